#!/usr/bin/env bash
# What a job does when its supervisor cannot do its part: Python does not start on this node, the package is away, the
# run directory is full or read-only, the supervisor was killed. A part of every rendered job script, so that it is
# there whatever else is away. It needs Slurm's commands alone, and leaves a queued job or a reason.
#
# Needs RELAYRUN_RUN_DIR, RELAYRUN_JOB_NAME, RELAYRUN_AUTO_REQUEUE, RELAYRUN_MAX_FAILED_BEGINS, RELAYRUN_BEGIN_BACKOFF;
# for a job that may start with fewer nodes RELAYRUN_NODE_COUNTS, all of them first, and RELAYRUN_NTASKS_PER_NODE.

# A person's defaults for Slurm's commands, handed on by sbatch: with SQUEUE_STATES=RUNNING no job would wait. And
# CDPATH makes `cd` print.
unset "${!SQUEUE_@}" "${!SCANCEL_@}" "${!SINFO_@}" "${!SBATCH_@}" SLURM_CLUSTERS CDPATH

# Run what touches a file, and print what it prints; 124 where it has not ended by then. A file system that hangs must
# not hold this script, and not even SIGKILL ends what waits for one.
within() { # seconds, command
  local said="" code="" from
  exec {from}< <("${@:2}" && printf '\0%s\0' 0 || printf '\0%s\0' "$?")
  ! IFS= read -r -d '' -t "$1" said <&"${from}" || read -r -d '' -t 1 code <&"${from}" || true
  exec {from}<&-
  printf '%s' "${said}"
  return "${code:-124}"
}

# One of Slurm's commands, for two minutes at most. Slurm sends SIGTERM to every process of a job that it ends or queues
# again. This one does not heed it: `timeout` would hand it on.
slurm() { # command
  timeout --signal=KILL 120 bash -c 'trap "" TERM USR2; exec "$@"' bash "$@"
}

# Whole or not at all.
write_stop() { # done, stopped or failed; reason
  local -r temporary="${RELAYRUN_RUN_DIR}/.STOP-${SLURM_JOB_ID:-local}"
  [[ ! -e "${RELAYRUN_RUN_DIR}/STOP" ]] || return 0
  printf 'state: %s\nreason: %s\n\nThe chain has ended. To go on all the same: submit with --resume.\n' "$1" "$2" \
    >"${temporary}" &&
    mv -n "${temporary}" "${RELAYRUN_RUN_DIR}/STOP"
  rm -f "${temporary}"
}

# The reason, where people look: the job's log and comment, and STOP if the run directory takes it.
give_up() { # stopped or failed, reason, comment
  echo "[relayrun $(date +%FT%T)] the chain ends: $2" >&2
  [[ -z "${SLURM_JOB_ID:-}" ]] || slurm scontrol update "JobId=${SLURM_JOB_ID}" "Comment=$3"
  within 60 write_stop "$1" "$2"
  within 30 tell_people
  exit 1
}

# Somebody is told of STOP, where the package and a Python are there; else the next `relayrun` command tells it.
tell_people() {
  PYTHONSAFEPATH=1 PYTHONPATH="${RELAYRUN_ROOT:-}" "${RELAYRUN_HOST_PYTHON:-python3}" \
    "${RELAYRUN_ROOT:-}/launchers/lib/run_module.py" relayrun.control.chain tell --run-dir "${RELAYRUN_RUN_DIR}" >/dev/null 2>&1
}

# What Slurm says of a question; it is asked until it answers or the job is at its limit.
asked_of_slurm() { # the question
  local answer
  until answer="$(slurm "$@")"; do
    sleep 30
  done
  printf '%s' "${answer}"
}

# The successor that this job had, if somebody cancelled it.
cancelled_successor() {
  local successor
  successor="$(sed -n 's/.*"job_id": "\([0-9]*\)".*/\1/p' "${attempt_dir:-/nowhere}/successor.json" 2>/dev/null)"
  [[ -n "${successor}" ]] || return
  if grep -q '"cancelled": true' "${attempt_dir}/successor.json" ||
    [[ "$(slurm squeue --noheader --states=all --jobs="${successor}" --format=%T 2>/dev/null)" == CANCELLED ]]; then
    printf '%s' "${successor}"
  fi
}

# Whether Slurm has taken the order to queue this job again; until its processes are gone it is COMPLETING.
requeued() { # job
  [[ "$(asked_of_slurm squeue --noheader --states=all --jobs="$1" --Format=RestartCnt)" =~ ^([0-9]+) ]] &&
    ((BASH_REMATCH[1] > ${SLURM_RESTART_COUNT:-0}))
}

# Slurm answers, and does not queue this job again: a site may let nobody change a job.
not_taken() { # what failed, comment
  local waits
  waits="$(asked_of_slurm squeue --noheader --me --name="${RELAYRUN_JOB_NAME}-fallback" --states=PENDING --format=%i)"
  [[ -n "${waits}" ]] || give_up failed "$1, and Slurm does not queue the job again" "$2"
  echo "[relayrun $(date +%FT%T)] Slurm does not queue this job again; the fallback job ${waits%%$'\n'*} goes on" >&2
  exit 1
}

readonly DISK_FULL=28 # exit code of `begin`

# Queue this job again, later each time, unless another waits behind it, or a person has ended the chain.
again() { # what failed, exit code
  trap - EXIT
  trap '' TERM USR2
  set +e
  local -r job="${SLURM_JOB_ID:-${RELAYRUN_LOCAL_JOB_ID:-}}" node="${SLURMD_NODENAME:-$(uname -n)}"
  local -r marker="relayrun:begin-failed="
  local what="$1 failed in job ${job} on ${node} (exit code $2)"
  (($2 != DISK_FULL)) || what+=": the disk of ${RELAYRUN_RUN_DIR} is full"
  echo "[relayrun $(date +%FT%T)] ${what}" >&2
  ! within 30 test -e "${RELAYRUN_RUN_DIR}/STOP" || exit 1
  [[ "${RELAYRUN_AUTO_REQUEUE}" == true ]] || give_up failed "${what}" "${marker}1@${node}"
  [[ -n "${SLURM_JOB_ID:-}" ]] || exit 75 # whoever runs the local queue does what follows

  local comment failed=0 refused=0 nodes="" others delay successor state taken
  local given kept="" name exclude count number=""
  local -a counts names
  comment="$(asked_of_slurm squeue --noheader --jobs="${job}" --format=%k)"
  if [[ "${comment}" =~ ^"${marker}"([0-9]+)@(.*)$ ]]; then
    failed="${BASH_REMATCH[1]}" nodes="${BASH_REMATCH[2]:+${BASH_REMATCH[2]},}"
  fi
  # a person has ended the chain, and a full disk took no STOP
  [[ "${comment}" != relayrun:stopped-by=* ]] || give_up stopped "stopped by ${comment#*=}" "${comment}"
  ! within 30 test -e "${RELAYRUN_RUN_DIR}/triggers/exit" || give_up stopped "exit trigger, and ${what}" "${comment}"
  failed=$((failed + 1))
  delay=$((RELAYRUN_BEGIN_BACKOFF << (failed - 1)))
  if (($2 == DISK_FULL)); then # no node's fault, and nobody frees a disk within a minute: each try costs nodes
    delay=$((20 * delay))
  elif [[ ",${nodes}" != *",${node},"* ]]; then
    nodes+="${node},"
  fi
  comment="${marker}${failed}@${nodes%,}"
  # it may have been the node: the next try leaves it out, where Slurm says that there are others, if need be fewer; or
  # those that this one leaves out; or those of a person
  given="$(asked_of_slurm squeue --noheader --jobs="${job}" --format=%x)"
  [[ "${given}" != "(null)" ]] || given=""
  mapfile -t names < <([[ -z "${given}" ]] || asked_of_slurm scontrol show hostnames "${given}")
  for name in "${names[@]:-}"; do
    [[ -z "${name}" || ",${nodes}" == *",${name},"* ]] || kept+="${kept:+,}${name}"
  done
  read -ra counts <<<"${RELAYRUN_NODE_COUNTS:-}"
  for exclude in "${given}${given:+${nodes:+,}}${nodes%,}" "${given}" ${given:+"${kept}"}; do
    for count in "${counts[@]:-}"; do
      [[ -n "${exclude}${count}" ]] || break 2
      ! slurm sbatch --test-only ${exclude:+--exclude="${exclude}"} ${count:+--nodes="${count}"} "$0" 2>/dev/null ||
        break 2
    done
    count=""
  done
  # all of them, too: the last time it may have been fewer
  [[ -z "${count}" ]] || ((count == counts[0] && failed == 1)) ||
    number="NumNodes=${count}-${counts[0]} NumTasks=$((count * RELAYRUN_NTASKS_PER_NODE))"
  if [[ "${exclude}" == "${given}" ]]; then exclude=""; else exclude=" ExcNodeList=${exclude}"; fi

  while :; do # as long as the job lasts: a controller may be away for hours
    others="$(asked_of_slurm squeue --noheader --me --name="${RELAYRUN_JOB_NAME}" --states=PENDING --format=%i)"
    if [[ -n "${others}" ]]; then
      echo "[relayrun $(date +%FT%T)] job ${others%%$'\n'*} goes on" >&2
      exit 1
    fi
    successor="$(within 150 cancelled_successor)"
    [[ -z "${successor}" ]] || give_up stopped "the successor, job ${successor}, was cancelled" "${comment}"
    ! requeued "${job}" || exit 1 # by somebody with more rights to its nodes, say
    # Slurm would also bring back a job that it ends now because somebody cancelled it: that one has time left (%L)
    state="$(asked_of_slurm squeue --noheader --jobs="${job}" --format="%T %L")"
    [[ "${state}" =~ ^RUNNING|\ (0:00|INVALID)$ ]] || give_up stopped "${what}, while Slurm ended the job" "${comment}"
    ((failed < RELAYRUN_MAX_FAILED_BEGINS)) || give_up failed "${what}, ${failed} times in a row" "${comment}"
    echo "[relayrun $(date +%FT%T)] job ${job} queues itself again, not before ${delay} s from now" >&2
    # first what counts the tries, so that they end; at its time limit a job takes no change before it is queued again
    printf '%s\n' "update JobId=${job} Requeue=1" "update JobId=${job} Comment=${comment}" | slurm scontrol
    taken="${comment}"
    [[ "${state}" != RUNNING* ]] || taken="$(asked_of_slurm squeue --noheader --jobs="${job}" --format=%k)"
    if [[ "${taken}" == "${comment}" ]]; then
      # one process: with the first order Slurm ends this script
      printf '%s\n' "requeue ${job}" ${number:+"update JobId=${job} ${number}"} \
        "update JobId=${job} StartTime=now+${delay} Comment=${comment}${exclude}" |
        slurm scontrol
      ! requeued "${job}" || exit 1
    fi
    ((++refused < 10)) || not_taken "${what}" "${comment}"
    sleep "$((refused < 3 ? 2 : 30))"
  done
}
trap 'again "the batch script" $?' EXIT
