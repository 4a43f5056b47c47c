#!/bin/bash
# Merges the shards of every dump of a tokenized dataset on Slurm, one job for each folder dump-i:
#   scripts/tokenization/submit_merge.sh tokens/my-tokenizer/my-text
# makes tokens/my-tokenizer/my-text-merge/dump-i-merged.bin and .idx; what is there already is left out. All shards, and
# the free space, are looked at before a job is queued.
# CLUSTER=NAME: in that site's surroundings. No output may lie below a path that a cluster protects: of CLUSTER=NAME, or else of any in configs/clusters/.
# Options for all jobs (partition, account, time) stand in merge.sh, or in sbatch's own variables.
set -euo pipefail
unset CDPATH # with it `cd` prints

dataset=$(realpath -- "${1:?the folder that holds dump-0, dump-1, ...}")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/lib/python.sh"

logs=${PATH_TO_LOGS:-$RELAYRUN_ROOT/logs}/slurm/merge-$(basename -- "$dataset")
"$PYTHON" -m relayrun.config.compose.writable "$dataset-merge" "$logs"
pending=$("$PYTHON" -m relayrun.tokens.tokenize merges "$dataset")
names=()
[[ -z $pending ]] || mapfile -t names <<<"$pending"
mkdir -p -- "$logs" "$dataset-merge"
source "$here/lib/site.sh"
for name in "${names[@]}"; do
  job=$(sbatch --parsable "${site[@]}" --job-name="merge-$name" --output="$logs/R-%x-%j.out" --error="$logs/R-%x-%j.err" \
    "$here/merge.sh" "$dataset/$name" "$dataset-merge/$name-merged")
  echo "$name: Slurm job ${job%%;*}"
done
echo "logs: $logs"
