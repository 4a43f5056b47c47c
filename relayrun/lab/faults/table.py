"""The table of faults: for each fault its action on a chain, and the required end of the chain.

`resumed`: the run finishes, and every loss and every tensor equals that of the undisturbed run. `stopped`: the chain
ends, states the reason in STOP, and leaves no job in the queue. Tests and `relayrun drill` read the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from relayrun.lab.faults import actions
from relayrun.lab.faults.target import FaultTarget


class FaultRequirement(Enum):
    """Rights that a fault needs beyond a user's; the value explains why it is left out without them."""

    CONTROL = "it ends daemons of Slurm or changes slurm.conf: only on a test cluster"
    PARTITIONS = "it needs two partitions, of which one takes the nodes of the other: only on a test cluster"
    ROOT = "it needs root's rights, for a small file system or to stop slurmstepd: only on a test cluster, by root"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the table."""

    name: str
    what: str
    expect: Literal["resumed", "stopped"]
    causes: Sequence[str]
    """Required causes of the attempts' ends, in order; see `AttemptEnd.cause`. `a|b`: either."""
    act: Callable[[FaultTarget], None] = actions.do_nothing
    """Called when the first attempt has begun."""
    before_begin: bool = False
    """Call `act` right after the submit: it keeps the first attempt from beginning."""
    inject: str = ""
    """Faults for `relayrun.lab.faults.injection.FaultInjection`, in every rank."""
    config: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Changes of the run config, by section."""
    says: str = ""
    """Required text in STOP, or in the reasons of the attempts' ends."""
    logged: str = ""
    """Required text in the jobs' logs."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Bash by name of a scheduler's command or the supervisor's `python3`, run before it, inside jobs alone.

    `${real}` is the command; Bash that does harm creates the file `${provoked}`.
    """
    small_disk: str = ""
    """Folder of the run directory that becomes a small file system of its own; `.` is all of it."""
    needs: FaultRequirement | None = None
    """None: any user who may submit jobs can inject it."""
    long: bool = False
    """It waits for Slurm's own timers."""


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
  exec "${real}" -m relayrun.lab.faults.supervisor_faults kill-with-parent STOP "$@"
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
if [[ " $* " == *" relayrun.control.chain begin "* && -e "${RELAYRUN_RUN_DIR}/attempts/0001" &&
  ! -e "${provoked}" ]]; then
  touch "${provoked}"
  exec "${real}" -m relayrun.lab.faults.supervisor_faults kill begin.json "$@"
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
if [[ " $* " == *" relayrun.control.chain begin "* && -e "${RELAYRUN_RUN_DIR}/attempts/0001" &&
  ! -e "${provoked}" ]]; then
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
if [[ " $* " == *" relayrun.control.chain begin "* && -e "${RELAYRUN_RUN_DIR}/attempts/0001" &&
  ! -e "${provoked}" ]]; then
  touch "${provoked}"
  exec "${real}" -m relayrun.lab.faults.supervisor_faults change-owner begin.json "$@"
fi"""
        },
        logged="another user is about to take this run over",
        long=True,
    ),
)


PROGRAM_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="rank-killed",
        what="SIGKILL of a rank after a checkpoint",
        expect="resumed",
        causes=("failed", "done"),
        act=actions.kill_rank,
    ),
    Fault(
        name="crash-loop",
        what="an exception before the first step, every time",
        expect="stopped",
        causes=("failed", "failed"),
        inject="crash-at-once",
        config={"chain": {"max_failed_attempts": 2}},
        act=actions.start_next_job_now,
        says="2 attempts in a row without a new durable iteration",
    ),
    Fault(
        name="crash-after-progress",
        what="an exception on all ranks after a checkpoint",
        expect="resumed",
        causes=("failed", "done"),
        inject="crash-at=15",
        long=True,
    ),
    Fault(
        name="loss-nan",
        what="the loss becomes NaN on one rank, training.on_nan: stop",
        expect="stopped",
        causes=("fatal",),
        inject="nan-sample=100",
        says="loss nan, gradient norm nan",
    ),
    Fault(
        name="rank-stopped",
        what="SIGSTOP of a rank",
        expect="resumed",
        causes=("hang", "done"),
        act=actions.stop_rank,
        config={"chain": {"hang_timeout": 5}},
        says="ranks 1 did not answer",
        long=True,
    ),
    Fault(
        name="rank-asleep",
        what="one rank sleeps, the others wait in a collective",
        expect="resumed",
        causes=("hang", "done"),
        inject="sleep-at=15:1",
        config={"chain": {"hang_timeout": 5}},
        says="all ranks answered, others wait for rank 1 in",
        long=True,
    ),
    Fault(
        name="killed-while-staging",
        what="SIGKILL while .staging holds bytes and no commit",
        expect="resumed",
        causes=("failed", "done"),
        inject="publish-delay=10",  # time to reach the nodes
        act=actions.kill_while_staging,
        long=True,
    ),
    Fault(
        name="latest-torn",
        what="the newest checkpoint is torn",
        expect="resumed",
        causes=("failed", "done"),
        act=actions.tear_latest,
    ),
    Fault(
        name="tracker-missing",
        what="latest_checkpointed_iteration.txt is gone",
        expect="resumed",
        causes=("failed", "done"),
        act=actions.lose_tracker,
        long=True,
    ),
    Fault(
        name="module-missing",
        what="a module that no node has",
        expect="stopped",
        causes=("failed", "failed"),
        config={"chain": {"max_failed_attempts": 2}, "cluster": {"modules": ["no/such"]}},
        act=actions.start_next_job_now,
        says="module load no/such failed",
        long=True,
    ),
    Fault(
        name="setup-fails",
        what="a line of job.setup that fails",
        expect="stopped",
        causes=("fatal",),
        config={"job": {"setup": ["ls /no/such/site"]}},
        says="job.setup failed (exit code 2) at: ls /no/such/site",
        long=True,
    ),
    Fault(
        name="python-missing",
        what="a Python that no node has",
        expect="stopped",
        causes=("fatal",),
        config={"cluster": {"python": "no-such-python"}},  # the submit checks absolute paths itself
        says="no-such-python is not found on any rank",
        long=True,
    ),
    Fault(
        name="disk-full",
        what="no space during a save, space again later",
        needs=FaultRequirement.ROOT,
        expect="resumed",
        causes=("done",),
        act=actions.fill_disk,
        small_disk="checkpoints",
        long=True,
    ),
    Fault(
        name="overtaken",
        what="an attempt stopped inside its save goes on beside its successor",
        needs=FaultRequirement.ROOT,
        expect="resumed",
        causes=("unknown", "done"),
        inject="publish-delay=2",
        act=actions.revive_replaced_attempt,
        long=True,
    ),
    Fault(
        name="commit-full",
        what="no space for the commit line, twice for one iteration, then space again",
        expect="resumed",
        causes=("saved", "done"),
        inject="commit-full=2",
        act=actions.ask_to_leave,
        config={"checkpoint": {"interval": 1000}},
        logged="SAVE FAILED at iteration",
        long=True,
    ),
)


FAULTS: tuple[Fault, ...] = (*PROGRAM_FAULTS, *JOB_FAULTS)
FAULTS_BY_NAME = {fault.name: fault for fault in FAULTS}
