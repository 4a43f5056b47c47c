#!/usr/bin/env bash
# What the sbatch scripts of this folder source behind their settings block. The first job of a run prepares
# the run directory from the settings; its successors are rendered jobs that need no settings.
#
#   bash launchers/submit-demo.sh [OPTIONS]     check, then submit with these options of sbatch
#   sbatch launchers/submit-demo.sh             submit; what is wrong is found in the job, and `relayrun status` says it
#   bash launchers/submit-demo.sh --check       what would be refused, and the plan of the run; nothing is submitted
#   bash launchers/submit-demo.sh --dry-run     the same, briefly, and the job that every attempt will be
set -euo pipefail
unset CDPATH # with it `cd` prints

RELAYRUN_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

# The Python that has relayrun's packages: PYTHON, else that of .venv/, else the one that made this project.
python_of_project() {
  local python="${PYTHON:-${RELAYRUN_ROOT}/.venv/bin/python}"
  if [[ -z "${PYTHON:-}" && ! -x "${python}" && -f "${RELAYRUN_ROOT}/.relayrun" ]]; then
    python="$(sed -n 's/^python=//p' "${RELAYRUN_ROOT}/.relayrun")"
  fi
  if ! command -v "${python}" >/dev/null; then
    echo "error: ${python:-no Python}: there is no such program
  -> name the Python that has relayrun: PYTHON=/path/to/python, or python=... in ${RELAYRUN_ROOT}/.relayrun" >&2
    return 1
  fi
  printf '%s' "${python}"
}

prepare() { # arguments of `relayrun launch`
  local python file="${CONFIG}"
  python="$(python_of_project)" || return
  [[ "${file}" == /* ]] || file="${RELAYRUN_ROOT}/${file}"
  local -a path=() # a checkout's own package; a project has none, and the installed one is taken
  [[ ! -d "${RELAYRUN_ROOT}/relayrun" ]] || path=(PYTHONPATH="${RELAYRUN_ROOT}")
  env PYTHONSAFEPATH=1 "${path[@]}" "${python}" -m relayrun.cli launch "${file}" "$@"
}

if [[ -n "${SLURM_ARRAY_JOB_ID:-}" || " $*" == *" --array"* || " $*" == *" -a"* ]]; then
  echo "error: a launcher begins one run, not one for each task of an array: sweeps are for \`relayrun sweep submit\`" >&2
  exit 1
fi
if [[ -z "${SLURM_JOB_ID:-}" ]]; then
  if [[ "${1:-}" == --dry-run ]]; then
    prepare --dry-run
    exit 0
  fi
  if [[ "${1:-}" == --check ]]; then
    prepare --check="${0}"
    exit 0
  fi
  prepare --check="${0}"
  exec sbatch "$@" "${0}"
fi
if (($#)); then
  echo "error: sbatch hands $* to the job, which takes no options: bash LAUNCHER --check looks before the queue" >&2
  exit 1
fi

# From any working directory the logs lie in one place; Slurm's own output file holds only this line.
logs="${RELAYRUN_ROOT}/logs/slurm/training"
log="${logs}/${SLURM_JOB_NAME}-${SLURM_JOB_ID}"
if ! { mkdir -p "${logs}" && : >>"${log}.out" && : >>"${log}.err"; }; then
  echo "error: ${logs}: the folder of the jobs' logs cannot be written, so no job is started
  -> let its owner open it (chmod g+w), or use a checkout of your own" >&2
  exit 1
fi
echo "logs: ${log}.out and .err"
exec {slurm_output}>&1 # Slurm's own
exec >>"${log}.out" 2>>"${log}.err"
# shellcheck disable=SC2034  # the job script reads it
relayrun_log_is_open=1

# Prepare the run, with what is said of it in the log and in a record. A start that is refused has no run directory:
# `relayrun status` reads the record, which goes with the next start of this launcher.
prepare_and_record() {
  { prepare 2>&1 >&3 | tee "${log}.refused" >&2; } 3>&1 || return "${PIPESTATUS[0]}"
}

refuse() { # exit code
  echo "refused: $(sed -n '/^error: /,$p' "${log}.refused" | tr -s ' \n' ' ')" >&"${slurm_output}"
  exit "$1"
}

asked="" # a signal during the preparation, for job.sh
trap 'asked="SIGUSR2"' USR2
trap 'asked="SIGTERM"' TERM
adopted="${logs}/.run-of-job-${SLURM_JOB_ID}" # what Slurm starts again is this launcher, not the job script
if [[ "${SLURM_RESTART_COUNT:-0}" != 0 && -s "${adopted}" ]]; then
  run_dir="$(<"${adopted}")"
else
  run_dir="$(prepare_and_record)" || refuse "$?"
  rm -f "${logs}/${SLURM_JOB_NAME}"-*.refused || true
  printf '%s' "${run_dir}" >"${adopted}" || true # with a full disk the job still runs: it cannot come back
fi
# From here on this is the job that every successor is; its root may be a snapshot of the code.
# shellcheck source=launchers/lib/job.sh
source "${run_dir}/job.sbatch"
