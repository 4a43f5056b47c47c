# shellcheck shell=bash
# The Python of the submit scripts and their jobs: PYTHON, else the one of .venv/, else python3.
# Sourced by scripts/tokenization/submit_*.sh. Slurm runs copies of the job scripts, so those are told the root.
RELAYRUN_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ ! -x $RELAYRUN_ROOT/.venv/bin/python ]] || PYTHON=$RELAYRUN_ROOT/.venv/bin/python
fi
export PYTHON RELAYRUN_ROOT
