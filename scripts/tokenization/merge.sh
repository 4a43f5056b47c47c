#!/bin/bash
# The job of one dump folder; submit_merge.sh submits it with the folder and the prefix of the result.
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --time=04:00:00
set -euo pipefail

root=${RELAYRUN_ROOT:?set by submit_merge.sh}
site_srun=() site_command=()
# shellcheck source=/dev/null
[[ -z ${RELAYRUN_SITE:-} ]] || source "$RELAYRUN_SITE"
# one task that has all of the job, although srun would bind it to the processors of one
[[ ${#site_srun[@]} == 0 ]] || site_srun=(srun --nodes=1 --ntasks=1 --cpu-bind=none --export=ALL "${site_srun[@]}")
exec "${site_srun[@]}" "${site_command[@]}" "${PYTHON:-python3}" "$root/scripts/tools/merge_datasets.py" --input "${1:?a dump folder}" --output-prefix "${2:?a prefix}"
