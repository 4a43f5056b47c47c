#!/usr/bin/env bash
# Gives an image relayrun's packages: a virtual environment on a file system that all nodes see, over the image's own.
# Runs inside the image, on a node with the processor of the ranks (aarch64 on Alps and JUPITER):
#   make container-env ENV=/scratch/YOU/relayrun-env [IMAGE_PYTHON=python3]
# What the image has stays as it is, torch first of all: of constraints-hashes.txt only what is missing is
# installed. cluster.python is then ENV/bin/python, a link to the image's own Python.
set -euo pipefail
unset CDPATH # with it `cd` prints

environment="${1:?ENV: a folder on a file system that all nodes see}"
python="${2:-python3}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
constraints="${CONSTRAINTS:-${root}/constraints-hashes.txt}"

if [[ -e "${environment}" && ! -e "${environment}/pyvenv.cfg" ]]; then
  echo "error: ${environment}: this is no virtual environment; name another folder" >&2
  exit 1
fi
"${python}" -c 'import torch' || {
  echo "error: the image's ${python} has no torch, or one that does not start here" >&2
  exit 1
}
"${python}" -m venv --system-site-packages "${environment}"
missing="${environment}/missing-packages.txt"
"${environment}/bin/python" - "${constraints}" >"${missing}" <<'PYTHON'
import importlib.metadata
import re
import sys

for line in open(sys.argv[1]):
    name = re.match(r"[A-Za-z0-9._-]+", line)
    if name is None or re.match(r"torch==|triton==|nvidia-|cuda-", line):
        continue  # the image's, or not at all
    try:
        importlib.metadata.version(name[0])
    except importlib.metadata.PackageNotFoundError:
        print(line.strip())
PYTHON
if [[ -s "${missing}" ]]; then
  # every package is named with its version: nothing is resolved, so nothing of the image is replaced
  "${environment}/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps --requirement "${missing}"
fi
site="$("${environment}/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
printf '%s\n' "${root}" >"${site}/relayrun.pth" # the checkout itself: jobs run what stands there
"${environment}/bin/python" - <<'PYTHON'
import platform

import megatron.core
import torch

import relayrun.config.compose.schema

print(f"{platform.machine()}: Python {platform.python_version()}, torch {torch.__version__}, ", end="")
print(f"megatron-core {megatron.core.__version__}, relayrun {relayrun.__version__}")
PYTHON
echo "set cluster.python=${environment}/bin/python"
