#!/usr/bin/env bash
#SBATCH --job-name=relayrun-convert
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#
# Exports a run's newest checkpoint to Hugging Face's form as a Slurm job, without a GPU:
#   sbatch scripts/conversion/do-convert.sh RUN DIR [options of `relayrun export hf`]
# DIR must not exist. Account, partition and the like: options of sbatch. The run's environment, modules, job.setup,
# container, command prefix and Python hold, as in its own jobs; PYTHON=... names another Python.
set -euo pipefail
unset CDPATH # with it `cd` prints

run="${1:?RUN: a run directory, or project/name below logs/runs}"
output="${2:?DIR: where to write}"
shift 2

# In a job this file is a copy in Slurm's spool; Slurm knows where it was submitted from.
self="${BASH_SOURCE[0]}"
[[ -z "${SLURM_JOB_ID:-}" ]] || self="$(scontrol show job "${SLURM_JOB_ID}" | sed -n 's/^ *Command=//p')"
# Slurm puts the arguments behind the path
self="${self%%/scripts/conversion/do-convert.sh*}/scripts/conversion/do-convert.sh"
root="$(cd "$(dirname "${self}")/../.." && pwd)"
export PYTHONSAFEPATH=1 PYTHONPATH="${root}"
outside="${PYTHON:-${root}/.venv/bin/python}"
command -v "${outside}" >/dev/null || outside=python3 # the run's own Python may be one of a container
run_command=() run_python=()
surroundings="$(mktemp)"
"${outside}" -m relayrun.train.export.job_environment "${run}" >"${surroundings}"
# shellcheck source=/dev/null
source "${surroundings}"
rm -f "${surroundings}"
[[ -z "${PYTHON:-}" && ${#run_python[@]} != 0 ]] || run_python=("${outside}")
exec "${run_command[@]}" "${run_python[@]}" -m relayrun.cli export hf "${run}" --output "${output}" "$@"
