#!/bin/bash
# The job of one dump folder; submit_merge.sh submits it with the folder and the prefix of the result.
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --time=04:00:00
set -euo pipefail

root=${RELAYRUN_ROOT:?set by submit_merge.sh}
exec "${PYTHON:-python3}" "$root/scripts/tools/merge_datasets.py" --input "${1:?a dump folder}" --output-prefix "${2:?a prefix}"
