#!/usr/bin/env bash
# torchrun.sh PYTHON ARGUMENT ... : one task a node starts torchrun, and torchrun makes the ranks of the node.
# RANK and WORLD_SIZE count the nodes here, and the ranks below torchrun. Nothing is started again: the chain does that.
set -euo pipefail
exec "$1" -m torch.distributed.run --nnodes="${WORLD_SIZE}" --node-rank="${RANK}" --master-addr="${MASTER_ADDR}" \
  --master-port="${MASTER_PORT}" --max-restarts=0 "${@:2}"
