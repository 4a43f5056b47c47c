#!/usr/bin/env bash
# One rank: srun's (or the local starter's) variables to torch's, then the program in this process.
# SIGUSR2 is ignored until the program installs its handler: it would kill a Python that still imports.
set -euo pipefail
trap '' USR2
export RANK="${SLURM_PROCID}" LOCAL_RANK="${SLURM_LOCALID}" WORLD_SIZE="${SLURM_NTASKS}"
exec "$@"
