#!/usr/bin/env bash
#SBATCH --job-name=relayrun-llama3-8b
#SBATCH --time=12:00:00
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=72
#SBATCH --exclusive
#
# The backstop of rank 0's own clock: to the batch script alone (B:), which asks the ranks to save and leave.
# Slurm sends it up to 60 s early.
#SBATCH --signal=B:SIGUSR2@540
#
# After a node failure the queued successor goes on; the same job coming back would make two.
#SBATCH --no-requeue
set -euo pipefail

# Settings. An empty one is as in the YAML that CONFIG names; behind the # stands what that says. To set one, write it
# behind :- or give it in the environment: MBS=4 sbatch launchers/submit-llama3-8b.sh.
# The environment holds over this block, and both over the YAML. Nodes, time and such: the #SBATCH lines hold.
export CONFIG="${CONFIG:-configs/runs/llama3-8b.yaml}"
export DATASETS="${DATASETS:-}"                   # /set/data.datasets; folders of .bin/.idx shards, separated by commas
export MIXTURE="${MIXTURE:-}"                     # none; instead of DATASETS: a mixture file, or PATH*,0.3;PATH*,0.7 (relayrun help data-order)
export MBS="${MBS:-}"                             # 1; sequences of a rank at a time
export GBS="${GBS:-}"                             # 128; sequences of an iteration
export SEQ_LEN="${SEQ_LEN:-}"                     # 8192; tokens
export TRAINING_STEPS="${TRAINING_STEPS:-}"       # 5000; iterations
export CHECKPOINT_STEPS="${CHECKPOINT_STEPS:-}"   # 250; iterations
export LOAD="${LOAD:-}"                           # none; begin with the checkpoint of another run, RUN[:ITERATION]
export AUTO_JOB_REQUEUE="${AUTO_JOB_REQUEUE:-}"   # false; a successor behind every job; costs node hours unattended
export TENSORBOARD="${TENSORBOARD:-}"             # true; event files in the run directory; W&B is on by WANDB_API_KEY
export LOG_NCCL="${LOG_NCCL:-}"                   # false; these four: relayrun help monitoring
export NSYS_PROFILER="${NSYS_PROFILER:-}"         # false
export MOCK_DATA="${MOCK_DATA:-}"                 # false
export BACKUP_CODEBASE="${BACKUP_CODEBASE:-}"     # false
export DATASET_CACHE_DIR="${DATASET_CACHE_DIR:-}" # none; numbers of rows that were counted once
export PROJECT_NAME="${PROJECT_NAME:-}"           # relayrun
export EXP_NAME="${EXP_NAME:-}"                   # llama3-8b

# In a job this file is a copy in Slurm's spool; Slurm knows where it was submitted from.
self="${BASH_SOURCE[0]:-}"
[[ -z "${SLURM_JOB_ID:-}" ]] || self="$(scontrol show job "${SLURM_JOB_ID}" | sed -n 's/^ *Command=\((null)\)\{0,1\}//p')"
[[ -f "$(dirname "${self}")/lib/launch.sh" ]] || {
  echo "error: ${self:-standard input}: a launcher is given by its path, and stays beside its folder lib/" >&2
  exit 1
}
# shellcheck source=lib/launch.sh
source "$(dirname "${self}")/lib/launch.sh"
