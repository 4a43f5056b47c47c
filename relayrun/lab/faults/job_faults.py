"""Faults of jobs: their batch scripts, supervisors and nodes, and Slurm itself."""

from __future__ import annotations

from relayrun.lab.faults import actions
from relayrun.lab.faults.fault import Fault, FaultRequirement

JOB_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="batch-script-killed",
        what="SIGKILL of the batch script",
        expect="resumed",
        causes=("saved|unknown", "done"),
        act=actions.kill_batch_script,
    ),
    Fault(
        name="batch-script-killed-requeue",
        what="the same in requeue mode",
        expect="resumed",
        causes=("saved|unknown", "done"),
        act=actions.kill_batch_script_under_guard,
        config={"chain": {"mode": "requeue"}},
        long=True,
    ),
    Fault(
        name="cancelled",
        what="scancel of the running job",
        expect="stopped",
        causes=("cancelled",),
        act=actions.cancel,
        says="cancelled",
    ),
    Fault(
        name="cancelled-unseen",
        what="scancel while the batch script cannot see it",
        expect="stopped",
        causes=("cancelled",),
        act=actions.cancel_after_killing_the_batch_script,
        says="cancelled",
        long=True,
    ),
    Fault(
        name="preempted",
        what="a job of a higher partition takes the nodes",
        needs=FaultRequirement.PARTITIONS,
        expect="resumed",
        causes=("saved", "done"),
        act=actions.preempt,
        config={"job": {"partition": "low"}},
        long=True,
    ),
    Fault(
        name="preempted-requeue",
        what="the same in requeue mode",
        needs=FaultRequirement.PARTITIONS,
        expect="resumed",
        causes=("saved", "done"),
        act=actions.preempt,
        config={"job": {"partition": "low"}, "chain": {"mode": "requeue"}},
        long=True,
    ),
    Fault(
        name="node-lost",
        what="slurmd of a node killed",
        needs=FaultRequirement.CONTROL,
        expect="resumed",
        causes=("saved|failed|unknown", "done"),
        act=actions.kill_node,
        inject="step-delay=1.5",
        long=True,
    ),
    Fault(
        name="controller-down-at-submission",
        what="slurmctld away for 60 s when the successor is queued",
        needs=FaultRequirement.CONTROL,
        expect="resumed",
        causes=("done",),
        act=actions.controller_down_at_submission,
        long=True,
    ),
    Fault(
        name="controller-down-at-exit",
        what="slurmctld away for 60 s when the job ends",
        needs=FaultRequirement.CONTROL,
        expect="resumed",
        causes=("saved", "done"),
        act=actions.controller_down_at_exit,
        long=True,
    ),
    Fault(
        name="predecessor-completing",
        what="a slow epilog: the predecessor stays COMPLETING, and its successor is lost",
        needs=FaultRequirement.CONTROL,
        expect="resumed",
        causes=("saved", "saved|unknown", "done"),
        act=actions.hold_job_in_completing,
        long=True,
    ),
    Fault(
        name="supervisor-missing",
        what="one node where the supervisor cannot start",
        expect="resumed",
        causes=("done",),
        act=actions.start_next_job_now,
        commands={
            "python3": """
[[ -s "${provoked}" ]] || echo "${SLURMD_NODENAME}" >"${provoked}"
[[ "$(<"${provoked}")" != "${SLURMD_NODENAME}" ]] || { echo "No module named relayrun" >&2; exit 1; }"""
        },
        logged="begin failed in job",
        long=True,
    ),
    Fault(
        name="run-directory-read-only",
        what="the run directory is read-only for a while when a job begins",
        needs=FaultRequirement.ROOT,
        expect="resumed",
        causes=("saved", "done"),
        act=actions.read_only_between_jobs,
        small_disk=".",
        logged="begin failed in job",
        long=True,
    ),
    Fault(
        name="node-lost-at-begin",
        what="a node lost with its batch script, before anything is queued",
        needs=FaultRequirement.CONTROL,
        expect="resumed",
        causes=("done",),
        act=actions.lose_node_before_begin,
        before_begin=True,
        commands={"python3": '[[ -e "${provoked}" ]] || { touch "${provoked}"; sleep 1000; }'},
        long=True,
    ),
    Fault(
        name="controller-confused",
        what="scontrol and squeue fail with an error that nobody knows, twice in every job",
        expect="resumed",
        causes=("failed", "done"),
        inject="crash-at=15",
        commands={
            name: f"""
echo >>"${{provoked}}"
job="$(tr '\\0' '\\n' <"/proc/${{PPID}}/environ" | sed -n 's/^SLURM_JOB_ID=//p')"
echo >>"${{provoked}}-{name}-${{job}}"
if (($(wc -l <"${{provoked}}-{name}-${{job}}") < 3)); then
  echo "slurm_load: Protocol version has changed, or so" >&2
  exit 1
fi"""
            for name in ("scontrol", "squeue")
        },
        long=True,
    ),
    Fault(
        name="watch-killed",
        what="SIGKILL of the supervisor's watch, then a rank hangs",
        expect="resumed",
        causes=("hang", "done"),
        act=actions.kill_watch,
        config={"chain": {"hang_timeout": 5}},
        says="ranks 1 did not answer",
        logged="watch ended (exit code 137); it starts again",
        long=True,
    ),
    Fault(
        name="watch-blind",
        what="a view that cannot be written and a torn heartbeat, then a rank hangs",
        expect="resumed",
        causes=("hang", "done"),
        act=actions.disable_watch,
        config={"chain": {"hang_timeout": 5}},
        says="ranks 1 did not answer",
        logged="the merged views: left for later",
        long=True,
    ),
    Fault(
        name="one-submitted-job",
        what="a limit of one submitted job",
        expect="resumed",
        causes=("failed", "done"),
        inject="crash-at=15",
        commands={
            "sbatch": """
touch "${provoked}"
echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
exit 1"""
        },
        logged="no successor yet: sbatch: sbatch: error: QOSMaxSubmitJobPerUserLimit",
        long=True,
    ),
    Fault(
        name="submission-misreported",
        what="sbatch queues the job and reports an error",
        expect="resumed",
        causes=("failed", "done"),
        inject="crash-at=15",
        commands={
            "sbatch": """
touch "${provoked}"
"${real}" "$@" >/dev/null
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1"""
        },
        long=True,
    ),
    Fault(
        name="end-killed",
        what="SIGKILL of end and of the batch script before STOP, with an exit asked for",
        expect="stopped",
        causes=("exit",),
        act=actions.ask_to_exit,
        commands={
            "python3": """
if [[ " $* " == *" relayrun.control.chain end "* ]]; then
  touch "${provoked}"
  exec "${real}" -m relayrun.lab.faults.kill_at_rename STOP WITH-PARENT "$@"
fi"""
        },
        says="exit trigger by",
        logged="killed before STOP",
    ),
    Fault(
        name="begin-killed",
        what="SIGKILL of begin before begin.json, behind an attempt that nobody closed",
        expect="resumed",
        causes=("saved|unknown", "done"),
        act=actions.kill_begin,
        config={"chain": {"max_failed_attempts": 1}},
        commands={
            "python3": """
if [[ " $* " == *" relayrun.control.chain begin "* && -e "${RELAYRUN_RUN_DIR}/attempts/0001" && ! -e "${provoked}" ]]; then
  touch "${provoked}"
  exec "${real}" -m relayrun.lab.faults.kill_at_rename begin.json ALONE "$@"
fi"""
        },
        logged="killed before begin.json",
        long=True,
    ),
    Fault(
        name="batch-script-killed-at-begin",
        what="SIGKILL of the batch script inside begin, which has queued nothing",
        expect="resumed",
        causes=("saved", "done"),
        act=actions.kill_batch_script_at_begin,
        commands={
            "python3": """
if [[ " $* " == *" relayrun.control.chain begin "* && -e "${RELAYRUN_RUN_DIR}/attempts/0001" && ! -e "${provoked}" ]]; then
  echo "${SLURM_JOB_ID}" >"${provoked}.tmp"
  mv "${provoked}.tmp" "${provoked}"
  kill -KILL "${PPID}"
  sleep 1000
fi"""
        },
        logged="failed and left no successor; job",
        long=True,
    ),
    Fault(
        name="successor-cancelled",
        what="scancel of the waiting successor",
        expect="stopped",
        causes=("saved",),
        act=actions.cancel_successor,
        says=", was cancelled",
    ),
    Fault(
        name="successor-held",
        what="a person holds the waiting successor, and the attempt fails",
        expect="resumed",
        causes=("failed", "done"),
        inject="crash-at=5",
        act=actions.hold_successor,
        long=True,
    ),
    Fault(
        name="view-unreadable",
        what="the merged metrics cannot be read when a job begins",
        expect="resumed",
        causes=("saved", "done"),
        act=actions.block_metrics_view,
        logged="the merged views: left for later",
        long=True,
    ),
    Fault(
        name="take-over-refused",
        what="another user's take-over writes the plan while a job begins, finds its attempt, and puts the plan back",
        expect="resumed",
        causes=("saved", "done"),
        act=actions.ask_to_leave,
        commands={
            "python3": """
if [[ " $* " == *" relayrun.control.chain begin "* && -e "${RELAYRUN_RUN_DIR}/attempts/0001" && ! -e "${provoked}" ]]; then
  touch "${provoked}"
  exec "${real}" -m relayrun.lab.faults.change_owner "$@"
fi"""
        },
        logged="another user is about to take this run over",
        long=True,
    ),
)
