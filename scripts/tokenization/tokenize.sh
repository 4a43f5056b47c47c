#!/bin/bash
# The job of one dump; submit_tokenization.sh submits it with the dump's number and its settings in the environment.
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR2@120
#SBATCH --no-requeue
# Before the time limit the job drops its open shards and queues itself again, and goes on with what is missing.
# --no-requeue: a dump that was killed goes on when it is submitted again; nothing runs twice behind your back.
set -euo pipefail

trap '' USR2 # inherited: Python that is still starting would die of it; later it has a handler and a deadline
site_srun=() site_command=()
# shellcheck source=/dev/null
[[ -z ${RELAYRUN_SITE:-} ]] || source "$RELAYRUN_SITE"
# one task that has all of the job, although srun would bind it to the processors of one
[[ ${#site_srun[@]} == 0 ]] || site_srun=(srun --nodes=1 --ntasks=1 --cpu-bind=none --export=ALL "${site_srun[@]}")
exec "${site_srun[@]}" "${site_command[@]}" "${PYTHON:-python3}" -m relayrun.tokens.tokenize run "${1:?the number of the dump}"
