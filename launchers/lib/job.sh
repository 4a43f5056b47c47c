#!/usr/bin/env bash
# The batch script of every attempt: sourced by the rendered job, on Slurm and on one machine.
# Needs RELAYRUN_RUN_DIR, RELAYRUN_ROOT, RELAYRUN_HOST_PYTHON. Decisions are the supervisor's (Python);
# here are only the traps, the start of the ranks, and the wait. Every way out leads through `end`, or through `again`.
set -euo pipefail
ulimit -c 0
# the next job executes what this one writes; job.setup may set another one for the ranks
umask g-w,o-w
began="${EPOCHREALTIME:-$(date +%s.%N)}"          # an old Bash does not know it
export RELAYRUN_SCRIPT_TIME="${began/,/.}"        # some locales write a comma
export RELAYRUN_USER_PYTHONPATH="${PYTHONPATH:-}" # as submitted: for the ranks, and for the next job
export RELAYRUN_USER_PYTHONSAFEPATH="${PYTHONSAFEPATH:-}"

# exit codes of the supervisor; any other one says that it could not do its part
readonly CHAIN_ENDS=10    # `begin`: the ranks must not start
readonly FAILED=12        # `end`: the attempt failed, and the chain has been seen to
readonly END_SECONDS=1800 # `end` waits for a controller, and longer only for a file system that hangs

if ! declare -F within >/dev/null; then # the job script is an earlier version's
  : "${RELAYRUN_JOB_NAME:=${SLURM_JOB_NAME:-}}" "${RELAYRUN_MAX_FAILED_BEGINS:=6}" "${RELAYRUN_BEGIN_BACKOFF:=30}"
  if [[ -z "${RELAYRUN_AUTO_REQUEUE:-}" ]]; then
    RELAYRUN_AUTO_REQUEUE=false
    ! grep -qs '"auto_requeue": true' "${RELAYRUN_RUN_DIR}/plan.json" || RELAYRUN_AUTO_REQUEUE=true
  fi
  # shellcheck source=launchers/lib/again.sh
  source "${RELAYRUN_ROOT}/launchers/lib/again.sh"
fi
attempt_dir=""
task=""
watcher=""
doing=""           # which code of the site runs in this script
clock=""           # gives the attempt up if `end` takes too long
asked="${asked:-}" # why the ranks were asked to leave, before there was somebody to ask
interrupted=""     # a trap ran since the last wait
leave_from=0       # seconds since 1970; before, SIGUSR2 is Slurm's warning for a job that has more time than this one
hang_seconds=300   # after which a process that stands still hangs

leave() { # exit code
  trap - EXIT
  [[ -z "${clock}" ]] || kill "${clock}" 2>/dev/null || true
  exit "$1"
}

# `begin` and `end` must not be cut short by a signal to everybody in the job: they ignore it. `watch` is
# ended by SIGTERM. Only for subshells: it becomes the Python.
supervisor() {
  local -r verb="$1"
  shift
  trap - EXIT
  trap '' USR2
  [[ "${verb}" == watch ]] || trap '' TERM
  PYTHONSAFEPATH=1 PYTHONPATH="${RELAYRUN_ROOT}" exec "${RELAYRUN_HOST_PYTHON}" \
    "${RELAYRUN_ROOT}/launchers/lib/run_module.py" relayrun.control.chain "${verb}" --run-dir "${RELAYRUN_RUN_DIR}" "$@"
}

end_watch() { # process id; it writes down what it has seen, but a file system that hangs must not hold the job
  kill "$1" 2>/dev/null && kill -CONT "$1" 2>/dev/null || return 0
  timeout 60 tail --pid="$1" -f /dev/null || kill -KILL "$1" 2>/dev/null || true
}

# How often a process has given up a processor: once a second or more, unless it is stopped or waits for a file system.
switches() { # process id
  { grep -s _ctxt_switches "/proc/$1/status" || true; } 2>/dev/null
}

# Start `watch` again when it ends before it is told to, and end it when it stands still: without it nobody sees ranks
# that hang. Not even SIGKILL ends a process that waits for a file system: then the batch script gives the attempt up.
keep_watching() {
  local watch="" code pause=5 seen still
  trap - EXIT
  trap '' USR2
  trap '[[ -z "${watch}" ]] || end_watch "${watch}"; exit 0' TERM
  while kill -0 $$ 2>/dev/null; do
    code=0 seen="" still=0
    supervisor watch --attempt "${attempt}" --batch-pid $$ &
    watch=$!
    while kill -0 "${watch}" 2>/dev/null; do
      sleep 5 &
      wait $! || true
      if [[ -z "${seen}" || "$(switches "${watch}")" != "${seen}" ]]; then
        seen="$(switches "${watch}")" still=${SECONDS}
      elif ((SECONDS - still > 5 * hang_seconds)); then
        kill -USR1 $$
      elif ((SECONDS - still > hang_seconds)); then
        kill -KILL "${watch}" 2>/dev/null || true
      fi
    done
    wait "${watch}" || code=$?
    watch=""
    ((code)) || exit 0
    echo "[relayrun $(date +%FT%T)] watch ended (exit code ${code}); it starts again" >&2 || true # a full log
    sleep "${pause}" &
    wait $! || true
    pause=$((pause < 60 ? 2 * pause : pause))
  done
}

# The file system of the run directory hangs: the log's may be the same.
give_up_attempt() {
  trap '' USR1
  within 30 log_hang || exec >/dev/null 2>&1
  again "the file system" 137
}

log_hang() {
  echo "[relayrun $(date +%FT%T)] the supervisor has stood still for longer than ranks may: the file system hangs" >&2
}

# Have this script give the attempt up later.
give_up_after() { # seconds
  trap - EXIT
  trap 'kill $!; exit 0' TERM
  sleep "$1" &
  wait $! && kill -USR1 $$
}

# Wait for a child and return its exit code. A trap ends `wait` early, with a code of its own; the true code is that of
# the last, undisturbed wait.
wait_for() { # process id
  local code
  while :; do
    interrupted="" code=0
    wait "$1" || code=$?
    [[ -n "${interrupted}" ]] || return "${code}"
  done
}

# Run `begin` and set attempt_dir; return its exit code. It runs in the background, so that a signal is heard though it
# waits for a file system: when Slurm is about to end the job, the next try is queued without it.
begin() {
  local pipe begun code
  exec {pipe}<> <(:)
  supervisor begin >&"${pipe}" &
  begun=$!
  while :; do
    interrupted=""
    code=0
    wait "${begun}" || code=$?
    [[ -n "${interrupted}" ]] || break
    for _ in {1..10}; do # it may be about to end by itself
      kill -0 "${begun}" 2>/dev/null || continue 2
      sleep 0.5
    done
    kill -KILL "${begun}" 2>/dev/null || continue
    again "begin, which was not done at ${asked}," 137
  done
  ((code)) || read -r -t 10 attempt_dir <&"${pipe}"
  exec {pipe}<&-
  return "${code}"
}

# Ask the ranks to save and leave: a file, which a Python that still imports will see, and a signal.
ask_to_leave() {
  asked="$1"
  interrupted=1
  if [[ "${asked}" == SIGUSR2 && ! -e "${attempt_dir}/stop" ]] && (($(date +%s) < leave_from)); then
    echo "[relayrun $(date +%FT%T)] SIGUSR2 comes early for a job with so little time; the ranks leave by their clock" >&2 ||
      true
    asked="" leave_from=0 # Slurm sends it once: the next one is meant
    return 0
  fi
  [[ -n "${attempt_dir}" ]] || return 0
  printf '%s\n' "${asked}" >"${attempt_dir}/stop" || true # a full disk must not end this script
  [[ -n "${task}" ]] || return 0
  [[ -n "${leave_signal}" ]] || return 0
  if ((${#signal_command[@]})); then
    # with SIGTERM Slurm signals the steps itself, and takes no more orders for a job that it ends
    [[ "${asked}" == SIGTERM ]] || "${signal_command[@]}" || true
  else
    kill -"${leave_signal}" "${task}" 2>/dev/null || true
  fi
}

# Why the ranks cannot be started: `end` says it, and when the next job tries again.
not_started() { # reason
  echo "$1" | tee "${attempt_dir}/not_started" >&2 || true
}

# Set the surroundings of the ranks, start them, and wait; return their exit code.
run_ranks() {
  local name code
  # shellcheck source=/dev/null
  source "${attempt_dir}/job.env" || return
  doing="${modules[*]:+module load ${modules[*]}}"
  for name in "${modules[@]}"; do
    set +eu +o pipefail # the site's code is not written for these options
    module load "${name}" && set -euo pipefail && continue
    code=$?
    set -euo pipefail
    not_started "module load ${name} failed"
    return "${code}"
  done
  doing=""
  trap 'died_in_attempt "$?"' EXIT # the site's code may have set another
  [[ -z "${asked}" ]] || ask_to_leave "${asked}"

  keep_watching &
  watcher=$!
  "${task_command[@]}" &
  task=$!

  code=0
  wait_for "${task}" || code=$?
  task=""

  kill "${watcher}" 2>/dev/null || true
  wait "${watcher}" || true
  return "${code}"
}

# Close the attempt, and leave with the exit code of the job.
end_attempt() { # exit code of the ranks
  local pause ended
  trap 'again "the batch script" $?' EXIT
  give_up_after "${END_SECONDS}" >/dev/null 2>&1 &
  clock=$!
  for pause in 2 10 30 0; do # what it could not write or ask may be possible a little later
    ended=0
    supervisor end --attempt "${attempt}" --exit-code "$1" & # in the background, so that a signal is heard
    wait_for $! || ended=$?
    case "${ended}" in
      0) leave 0 ;;
      "${FAILED}") leave 1 ;;
    esac
    sleep "${pause}"
  done
  kill "${clock}" 2>/dev/null || true
  again "end" "${ended}"
}

# The site's code may end this script, as modules can: the attempt has a reason, and the next job its pause, all the same.
died_in_attempt() { # exit code
  set +u
  [[ -n "${watcher}" ]] || not_started "the batch script ended${doing:+ in ${doing}}"
  [[ -z "${task}" ]] || kill "${task}" || true
  [[ -z "${watcher}" ]] || { kill "${watcher}" && wait "${watcher}"; } || true
  end_attempt "$(($1 ? $1 : 1))"
}

trap 'ask_to_leave "SIGUSR2"' USR2
trap 'ask_to_leave "SIGTERM"' TERM
trap give_up_attempt USR1 # from this script itself

code=0
begin || code=$?
case "${code}" in
  0) ;;
  "${CHAIN_ENDS}") leave 0 ;;
  *) again "begin" "${code}" ;;
esac
attempt="$((10#${attempt_dir##*/}))"
modules=() task_command=() signal_command=() leave_signal=USR2
trap 'died_in_attempt "$?"' EXIT
run_ranks || code=$?
end_attempt "${code}"
