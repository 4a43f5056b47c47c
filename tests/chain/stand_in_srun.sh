#!/usr/bin/env bash
# srun for one step on one of several pretended nodes of this machine: `stand_in_srun.sh --nodelist=n0 OPTION ... PROGRAM`
while [[ "$1" == --* ]]; do
  case "$1" in
    --nodelist=*) export SLURMD_NODENAME="${1#*=}" ;;
  esac
  shift
done
export RANK=0 WORLD_SIZE=1 SLURM_NODEID=0
exec "$@"
