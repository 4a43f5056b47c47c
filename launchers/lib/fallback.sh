#!/usr/bin/env bash
# The batch script of the fallback job, which Slurm starts where a job of the chain has failed: see
# relayrun/chain/fallback_job.py. A part of the rendered script, behind again.sh, whose `give_up` has the last word.
#
# Needs what again.sh and log.sh need, RELAYRUN_ROOT, RELAYRUN_HOST_PYTHON.

no_fallback() {
  give_up "a job of the chain failed, and the fallback job ${SLURM_JOB_ID} could not queue another one; see its log" \
    "relayrun:fallback-failed"
}
trap no_fallback TERM # the time limit

pause=5
while :; do # as long as the job lasts: a controller or a file system may be away
  PYTHONSAFEPATH=1 PYTHONPATH="${RELAYRUN_ROOT}" "${RELAYRUN_HOST_PYTHON}" -m relayrun.chain fallback \
    --run-dir "${RELAYRUN_RUN_DIR}" &
  wait "$!" && exit 0
  sleep "${pause}" &
  wait "$!"
  pause=$((pause < 60 ? 2 * pause : pause))
done
