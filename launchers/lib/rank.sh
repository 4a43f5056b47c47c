#!/usr/bin/env bash
# One rank: srun's (or the local starter's) variables to torch's, then the program in this process.
# SIGUSR1 and SIGUSR2 are ignored until the program installs its handlers: they would kill a Python that starts.
set -euo pipefail
trap '' USR1 USR2
export RANK="${SLURM_PROCID}" LOCAL_RANK="${SLURM_LOCALID}" WORLD_SIZE="${SLURM_NTASKS}"
shopt -s execfail
set +e # where it is on, bash leaves at once when a program with a slash in its name cannot be executed, whatever follows
exec "$@"
code=$?
# the first rank that ends ends the others: so all that cannot be started say so, also those that are told to end
trap '' TERM
sleep 3
exit "${code}"
