#!/bin/bash
# Pack `relayrun gpu-check` for a machine without network: this commit, and wheels that an image with torch lacks.
#
#   scripts/tools/gpu_check_bundle.sh FILE.tar.gz [PYTHON_VERSION [PACKAGE==VERSION ...]]
#
# On the machine: tar -xf FILE.tar.gz && gpu-check/run.sh --output RESULT.json
# PYTHON_VERSION is the Python of its torch, default 3.12. Packages that are there already cost only their bytes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

(($#)) || {
  sed -n '2,/^set/p' "${BASH_SOURCE[0]}" | sed '/^set/d; s/^# \{0,1\}//'
  exit 2
}
target=$(realpath "$1")
python_version=${2:-3.12}
shift $(($# < 2 ? $# : 2))

# what training imports beside torch, numpy, transformers, tokenizers and safetensors
megatron=$(
  python3 - "${python_version}" <<'PYTHON'
import re, sys, tomllib
train = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["train"]
new = tuple(map(int, sys.argv[1].split("."))) >= (3, 12)
for line in train:
    if line.startswith("megatron-core==") and (">=" in line.partition(";")[2]) == new:
        print(re.split(r"\s*;", line)[0])
PYTHON
)
packages=("${megatron}" pydantic pydantic-core annotated-types typing-inspection xxhash nvidia-ml-py "$@")
folder=$(mktemp -d)
trap 'rm -rf -- "${folder}"' EXIT
mkdir -p "${folder}/gpu-check/wheels"
options=(--quiet --only-binary=:all: --python-version "${python_version}" --implementation cp)
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
  options+=(--platform "${platform}_x86_64")
done
# pydantic names the one version of its core that it works with
core=$(python3 -m pip download "${options[@]}" --no-deps --dest "${folder}/gpu-check/wheels" pydantic &&
  unzip -p "${folder}"/gpu-check/wheels/pydantic-*.whl '*/METADATA' | sed -n 's/^Requires-Dist: \(pydantic-core==[^ ;]*\).*/\1/p')
packages=("${packages[@]/%pydantic-core/${core}}")
python3 -m pip download "${options[@]}" --no-deps --dest "${folder}/gpu-check/wheels" "${packages[@]}"
git archive HEAD relayrun configs launchers scripts pyproject.toml README.md LICENSE | tar -x -C "${folder}/gpu-check"
cat >"${folder}/gpu-check/run.sh" <<'RUN'
#!/bin/bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
unset PYTHONDONTWRITEBYTECODE # each of the many processes would compile all modules
if [[ ! -d site ]]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --target site wheels/*.whl
  python3 -m compileall -q -j 0 site relayrun || true
fi
export PYTHONPATH="${PWD}/site${PYTHONPATH:+:${PYTHONPATH}}"
exec python3 -m relayrun.cli gpu-check "$@"
RUN
chmod +x "${folder}/gpu-check/run.sh"
tar -czf "${target}" -C "${folder}" gpu-check
echo "${target}: $(du -h "${target}" | cut -f1), for Python ${python_version}: $(cd "${folder}/gpu-check/wheels" && echo *.whl)"
