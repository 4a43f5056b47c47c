#!/bin/bash
# Shuffles a dataset globally on several nodes of Slurm, as one job. Its options are those of reshard.py:
#   NODES=4 scripts/tokenization/submit_reshard.sh --dataset-folder raw/web --output-folder shuffled/web \
#     --temp-dir scratch/shuffles --seed 1 --threads 32 --memory-limit 100
# Files, column, folders and free space are looked at before the job is queued. The bytes are those of reshard.py on one node. All nodes must see the three folders. After a kill or an error the
# job goes on when it is queued again or submitted again: whole parts and files are kept, in --temp-dir.
# CLUSTER=NAME: in that site's surroundings. Options for the job (partition, account, time) stand in reshard.sh, or in sbatch's own variables.
set -euo pipefail
unset CDPATH # with it `cd` prints

# Settings: edit them here, or give them in the environment.
NODES="${NODES:-2}"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/lib/python.sh"

logs=${PATH_TO_LOGS:-$RELAYRUN_ROOT/logs}/slurm/reshard
NODES="$NODES" "$PYTHON" "$here/reshard.py" --stage check "$@"
"$PYTHON" -m relayrun.config.compose.writable "$logs"
mkdir -p -- "$logs"
source "$here/lib/site.sh"
job=$(sbatch --parsable "${site[@]}" --nodes="$NODES" --job-name=reshard --output="$logs/R-%x-%j.out" --error="$logs/R-%x-%j.err" \
  "$here/reshard.sh" "$@")
echo "Slurm job ${job%%;*}"
echo "logs: $logs"
