#!/usr/bin/env bash
# A user's batch script as the one task of a chain's job: wrapped.sh FOLDER SCRIPT ARGUMENT ...
# It finds what sbatch would give it: its folder, Slurm's variables of the job instead of this step's, a copy of itself
# that an edit does not change while it runs, and no variables of ranks. The chain queues its successors.
set -euo pipefail
folder="$1" script="$2"
shift 2

unset RANK LOCAL_RANK WORLD_SIZE
for name in "${!SLURM_@}"; do unset "${name}"; done
for name in "${!RELAYRUN_BATCH_SLURM_@}"; do # by job.setup, from before this step
  export "${name#RELAYRUN_BATCH_}=${!name}"
  unset "${name}"
done

copy="${RELAYRUN_CLIENT}/${script##*/}"
install -m 0600 "${script}" "${copy}.new" # it may hold a key
mv "${copy}.new" "${copy}"
export RELAYRUN_WRAPPED="${script##*/}"

# Scripts that queue themselves would begin a second chain.
sbatch() {
  if [[ " $* " == *"${RELAYRUN_WRAPPED}"* ]]; then
    echo "[relayrun] sbatch ${RELAYRUN_WRAPPED}: not done, the chain queues the next job" >&2
    return 0
  fi
  command sbatch "$@"
}
scontrol() {
  if [[ "${1:-}" == requeue* ]]; then
    echo "[relayrun] scontrol $*: not done, the chain queues the next job" >&2
    return 0
  fi
  command scontrol "$@"
}
export -f sbatch scontrol

cd "${folder}"
# rank.sh ignores these; what is ignored at its start a script cannot trap
exec env --default-signal="${RELAYRUN_WRAPPED_TRAPS:-PIPE}" bash "${copy}" "$@"
