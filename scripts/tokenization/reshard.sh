#!/bin/bash
# The job that shuffles a dataset; submit_reshard.sh submits it with the options of reshard.py.
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

root=${RELAYRUN_ROOT:?set by submit_reshard.sh}
site_srun=() site_command=()
# shellcheck source=/dev/null
[[ -z ${RELAYRUN_SITE:-} ]] || source "$RELAYRUN_SITE"
srun --kill-on-bad-exit=1 --cpu-bind=none "${site_srun[@]}" "${site_command[@]}" \
  "${PYTHON:-python3}" "$root/scripts/tokenization/reshard.py" "$@"
