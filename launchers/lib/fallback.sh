#!/usr/bin/env bash
# The batch script of the fallback job, which Slurm starts where a job of the chain has failed: see
# relayrun/control/chain/failover.py. A part of the rendered script, behind again.sh, whose `give_up` has the last word.
#
# Needs what again.sh and log.sh need, RELAYRUN_ROOT, RELAYRUN_HOST_PYTHON.

# Slurm ends this job, or is about to: at the time limit it takes no comment any more. One whose node goes to a job with
# more rights comes back; one that somebody cancels does not.
ended() {
  trap '' TERM USR2
  if [[ "$(slurm squeue --noheader --states=all --jobs="${SLURM_JOB_ID}" --Format=PreemptTime)" == [0-9]* ]]; then
    slurm scontrol requeue "${SLURM_JOB_ID}"
    ! requeued "${SLURM_JOB_ID}" || exit 1
  fi
  give_up failed \
    "a job of the chain failed, and the fallback job ${SLURM_JOB_ID} could not queue another one; see its log" \
    "relayrun:fallback-failed"
}

look() {
  trap '' TERM USR2 # not cut short between two orders
  PYTHONSAFEPATH=1 PYTHONPATH="${RELAYRUN_ROOT}" exec "${RELAYRUN_HOST_PYTHON}" \
    "${RELAYRUN_ROOT}/launchers/lib/run_module.py" relayrun.control.chain fallback --run-dir "${RELAYRUN_RUN_DIR}"
}

trap ended USR2 TERM

# the next job executes what this one writes
umask g-w,o-w
pause=5
while :; do # as long as the job lasts: a controller or a file system may be away
  look &
  wait "$!" && exit 0
  sleep "${pause}" &
  wait "$!"
  pause=$((pause < 60 ? 2 * pause : pause))
done
