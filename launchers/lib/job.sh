#!/usr/bin/env bash
# The batch script of every attempt: sourced by the rendered job, on Slurm and on one machine.
# Needs RELAYRUN_RUN_DIR, RELAYRUN_ROOT, RELAYRUN_HOST_PYTHON. Decisions are the supervisor's (Python);
# here are only the traps, the start of the ranks, and the wait.
set -euo pipefail
ulimit -c 0
export RELAYRUN_USER_PYTHONPATH="${PYTHONPATH:-}" # as submitted: for the ranks, and for the next job

readonly CHAIN_ENDS=10 # exit code of `begin` when the ranks must not start
attempt_dir=""
task=""
asked="${asked:-}" # why the ranks were asked to leave, before there was somebody to ask
interrupted=""     # a trap ran since the last wait

# `begin` and `end` must not be cut short by a signal to everybody in the job: they ignore it. `watch` is
# ended by SIGTERM. Only for subshells: it becomes the Python.
supervisor() {
  local -r verb="$1"
  shift
  trap '' USR2
  [[ "${verb}" == watch ]] || trap '' TERM
  PYTHONSAFEPATH=1 PYTHONPATH="${RELAYRUN_ROOT}" exec "${RELAYRUN_HOST_PYTHON}" -m relayrun.chain "${verb}" \
    --run-dir "${RELAYRUN_RUN_DIR}" "$@"
}

# Ask the ranks to save and leave: a file, which a Python that still imports will see, and a signal.
ask_to_leave() {
  asked="$1"
  interrupted=1
  [[ -n "${attempt_dir}" ]] || return 0
  printf '%s\n' "${asked}" >"${attempt_dir}/stop" || true # a full disk must not end this script
  [[ -n "${task}" ]] || return 0
  if ((${#signal_command[@]})); then
    # with SIGTERM Slurm signals the steps itself, and takes no more orders for a job that it ends
    [[ "${asked}" == SIGTERM ]] || "${signal_command[@]}" || true
  else
    kill -USR2 "${task}" 2>/dev/null || true
  fi
}
trap 'ask_to_leave "SIGUSR2"' USR2
trap 'ask_to_leave "SIGTERM"' TERM

code=0
attempt_dir="$(supervisor begin)" || code=$?
if ((code == CHAIN_ENDS)); then
  exit 0
elif ((code)); then
  exit "${code}"
fi
attempt="$((10#${attempt_dir##*/}))"
modules=() task_command=() signal_command=()
# shellcheck source=/dev/null
source "${attempt_dir}/job.env"
not_started="" # why the ranks cannot be started: `end` says it, and when the next job tries again
for name in "${modules[@]}"; do
  # in a list with ||: a failure must reach `end`
  module load "${name}" || { code=$? && not_started="module load ${name} failed" && break; }
done
if [[ -n "${not_started}" ]]; then
  printf '%s\n' "${not_started}" | tee "${attempt_dir}/not_started" >&2 || true
  (supervisor end --attempt "${attempt}" --exit-code "${code}")
  exit
fi
[[ -z "${asked}" ]] || ask_to_leave "${asked}"

supervisor watch --attempt "${attempt}" &
watcher=$!
"${task_command[@]}" &
task=$!

# A trap ends `wait` early, with a code of its own; the true code is that of the last, undisturbed wait.
while :; do
  interrupted=""
  code=0
  wait "${task}" || code=$?
  [[ -n "${interrupted}" ]] || break
done
task=""

kill "${watcher}" 2>/dev/null || true
wait "${watcher}" || true
(supervisor end --attempt "${attempt}" --exit-code "${code}")
