#!/usr/bin/env bash
# Create the virtual environment VENV with the versions of constraints.txt: torch first, then the rest,
# so that no other package pulls in another torch.
#
#   scripts/tools/setup.sh [VENV]      default: .venv; PYTHON=... chooses the interpreter (3.11 or 3.12)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
readonly VENV="${1:-.venv}"
readonly SUPPORTED='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
    if [[ -n "${candidate}" ]] && "${candidate}" -c "${SUPPORTED}" 2>/dev/null; then
      printf '%s\n' "${candidate}"
      return
    fi
  done
  echo "error: no Python 3.11 or 3.12 found; install one, or name it: PYTHON=/path/to/python3.11 make setup" >&2
  return 1
}

python="$(find_python)"
echo "set-up: ${VENV} with $("${python}" --version); torch, then the other packages (a few minutes on a first run)"
rm -f "${VENV}/.ready"
if ! "${VENV}/bin/python" -c "${SUPPORTED}" 2>/dev/null; then
  "${python}" -m venv --clear "${VENV}" || {
    echo "error: '${python} -m venv' failed; on Debian and Ubuntu install the package python3-venv" >&2
    exit 1
  }
fi
readonly PIP=("${VENV}/bin/python" -m pip --disable-pip-version-check --quiet)
echo "set-up: torch $(sed -n 's/^torch==//p' constraints.txt) ..."
"${PIP[@]}" install --constraint constraints.txt torch
echo "set-up: the other packages ..."
"${PIP[@]}" install --constraint constraints.txt --editable '.[dev,bench]'
touch "${VENV}/.ready"
echo "set-up: done"
