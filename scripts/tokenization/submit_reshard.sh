#!/bin/bash
# Shuffles a dataset globally as a job of one node. Its options are those of reshard.py:
#   scripts/tokenization/submit_reshard.sh --dataset-folder raw/web --output-folder shuffled/web \
#     --temp-dir scratch/shuffles --seed 1 --threads 32 --memory-limit 100
# Files, column, folders and memory are looked at before the job is queued. A job that is queued again begins again.
# CLUSTER=NAME: in that site's surroundings. Options for the job (partition, account, time) stand in reshard.sh, or in sbatch's own variables.
set -euo pipefail
unset CDPATH # with it `cd` prints

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/lib/python.sh"

logs=${PATH_TO_LOGS:-$RELAYRUN_ROOT/logs}/slurm/reshard
"$PYTHON" "$here/reshard.py" --check "$@"
"$PYTHON" -m relayrun.config.compose.writable "$logs"
mkdir -p -- "$logs"
source "$here/lib/site.sh"
job=$(sbatch --parsable "${site[@]}" --job-name=reshard --output="$logs/R-%x-%j.out" --error="$logs/R-%x-%j.err" \
  "$here/reshard.sh" "$@")
echo "Slurm job ${job%%;*}"
echo "logs: $logs"
