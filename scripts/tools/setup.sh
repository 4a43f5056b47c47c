#!/usr/bin/env bash
# Create the virtual environment VENV with the versions of constraints.txt: first the files whose hashes stand in
# constraints-hashes.txt and no others, then torch, whose builds have no hash there. Nothing pulls in another torch.
#
#   scripts/tools/setup.sh [VENV]      default: .venv; PYTHON=... chooses the interpreter (3.11 or 3.12)
#
# BUILD=cpu or cuda chooses torch's build. Without it: on a machine without an NVIDIA or AMD driver the build for CPUs,
# where pip's configuration offers it (an index or a folder of wheels with a version `+cpu`), else what pip takes; a
# build of the same version that VENV has stays: nodes with GPUs may share it.
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
echo "set-up: ${VENV} with $("${python}" --version); all packages by their hashes, then torch (a few minutes on a first run)"
rm -f "${VENV}/.ready"
if ! "${VENV}/bin/python" -c "${SUPPORTED}" 2>/dev/null; then
  "${python}" -m venv --clear "${VENV}" || {
    echo "error: '${python} -m venv' failed; on Debian and Ubuntu install the package python3-venv" >&2
    exit 1
  }
fi
readonly PIP=("${VENV}/bin/python" -m pip --disable-pip-version-check)
TORCH="$(sed -n 's/^torch==//p' constraints.txt)"
readonly TORCH BUILD="${BUILD:-auto}"

has_driver() {
  [[ -e /proc/driver/nvidia/version || -e /dev/kfd ]]
}

# Install torch at the version `$1`, which names its build: X+cpu, or ===X for one without a name.
install_torch() { # version, further options
  "${PIP[@]}" install --constraint constraints.txt "${@:2}" "torch==$1"
}

wants_cpu_build() {
  [[ "${BUILD}" == cpu ]] || { [[ "${BUILD}" == auto ]] && ! has_driver; }
}

torch_here() {
  "${VENV}/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))'
}

# setuptools first: it builds what has no wheel, and nothing is downloaded for a build
readonly LOCKED=(install --quiet --require-hashes --no-deps --no-build-isolation --requirement)
"${PIP[@]}" "${LOCKED[@]}" <(grep '^setuptools==' constraints-hashes.txt)
"${PIP[@]}" "${LOCKED[@]}" constraints-hashes.txt

here="$(torch_here 2>/dev/null || true)"
if [[ "${BUILD}" == auto && "${here%%+*}" == "${TORCH}" ]]; then
  echo "set-up: torch ${here} is there, and stays; BUILD=cpu or BUILD=cuda chooses another build"
elif wants_cpu_build && install_torch "${TORCH}+cpu" --quiet 2>/dev/null; then
  echo "set-up: torch ${TORCH}, its build for CPUs: BUILD=cpu, or this machine has no driver of a GPU"
elif [[ "${BUILD}" == cpu ]]; then
  echo "error: pip finds no torch ${TORCH}+cpu; name an index that has it: PIP_EXTRA_INDEX_URL=..." >&2
  exit 1
else
  echo "set-up: torch ${TORCH} as pip finds it; built for CUDA it is 2.7 GB to download, 5 GB on disk"
  echo "set-up: (PIP_EXTRA_INDEX_URL=... names an index with the small build for CPUs, which is taken where no GPU is)"
  install_torch "=${TORCH}" || install_torch "${TORCH}"
fi
echo "set-up: torch and what it alone needs have no hash here: its builds have other files under one version"
# without an index: it fails if a package is missing above, and downloads none
"${PIP[@]}" install --quiet --no-index --no-build-isolation --constraint constraints.txt --editable '.[dev,bench]'
touch "${VENV}/.ready"
echo "set-up: done, with torch $(torch_here)"
