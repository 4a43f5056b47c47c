#!/usr/bin/env bash
# `make demo-slurm`: a cluster of its own in .test-cluster/, the demo on it, and the cluster's end.
# A cluster that `make cluster-up` has started already is used and left running.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
readonly CLUSTER=scripts/tools/test_cluster.sh

if ! "${CLUSTER}" status >/dev/null 2>&1; then
  trap '"${CLUSTER}" down' EXIT
  "${CLUSTER}" up >/dev/null
fi
SLURM_CONF="${PWD}/.test-cluster/etc/slurm.conf"
export SLURM_CONF
.venv/bin/python -m scripts.demo --slurm "$@"
