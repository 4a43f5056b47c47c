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
    long: bool = True
    """It waits for Slurm's own timers."""

    @property
    def expect(self) -> Literal["resumed", "stopped"]:
        """The required end of the chain, which follows from the last cause."""
        return "resumed" if self.causes[-1] == "done" else "stopped"


JOB_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="batch-script-killed",
        what="SIGKILL of the batch script",
        causes=("saved|unknown", "done"),
        act=actions.kill_batch_script,
        long=False,
    ),
    Fault(
        name="batch-script-killed-requeue",
        what="the same in requeue mode",
        causes=("saved|unknown", "done"),
        act=actions.kill_batch_script_under_guard,
        config={"chain": {"mode": "requeue"}},
    ),
    Fault(
        name="cancelled",
        what="scancel of the running job",
        causes=("cancelled",),
        act=actions.cancel,
        says="cancelled",
        long=False,
    ),
    Fault(
        name="cancelled-unseen",
        what="scancel while the batch script cannot see it",
        causes=("cancelled",),
        act=actions.cancel_after_killing_the_batch_script,
        says="cancelled",
    ),
    Fault(
        name="preempted",
        what="a job of a higher partition takes the nodes",
        needs=FaultRequirement.PARTITIONS,
        causes=("saved", "done"),
        act=actions.preempt,
        config={"job": {"partition": "low"}},
    ),
    Fault(
        name="preempted-requeue",
        what="the same in requeue mode",
        needs=FaultRequirement.PARTITIONS,
        causes=("saved", "done"),
        act=actions.preempt,
        config={"job": {"partition": "low"}, "chain": {"mode": "requeue"}},
    ),
    Fault(
        name="node-lost",
        what="slurmd of a node killed",
        needs=FaultRequirement.CONTROL,
        causes=("saved|failed|unknown", "done"),
        act=actions.kill_node,
        inject="step-delay=1.5",
    ),
    Fault(
        name="controller-down-at-submission",
        what="slurmctld away for 60 s when the successor is queued",
        needs=FaultRequirement.CONTROL,
        causes=("done",),
        act=actions.controller_down_at_submission,
    ),
    Fault(
        name="controller-down-at-exit",
        what="slurmctld away for 60 s when the job ends",
        needs=FaultRequirement.CONTROL,
        causes=("saved", "done"),
        act=actions.controller_down_at_exit,
    ),
    Fault(
        name="predecessor-completing",
        what="a slow epilog: the predecessor stays COMPLETING, and its successor is lost",
        needs=FaultRequirement.CONTROL,
        causes=("saved", "saved|unknown", "done"),
        act=actions.hold_job_in_completing,
    ),
    Fault(
        name="supervisor-missing",
        what="one node where the supervisor cannot start",
        causes=("done",),
        act=actions.start_next_job_now,
        commands={
            "python3": """
[[ -s "${provoked}" ]] || echo "${SLURMD_NODENAME}" >"${provoked}"
[[ "$(<"${provoked}")" != "${SLURMD_NODENAME}" ]] || { echo "No module named relayrun" >&2; exit 1; }"""
        },
        logged="begin failed in job",
    ),
    Fault(
        name="run-directory-read-only",
        what="the run directory is read-only for a while when a job begins",
        needs=FaultRequirement.ROOT,
        causes=("saved", "done"),
        act=actions.read_only_between_jobs,
        small_disk=".",
        logged="begin failed in job",
    ),
    Fault(
        name="node-lost-at-begin",
        what="a node lost with its batch script, before anything is queued",
        needs=FaultRequirement.CONTROL,
        causes=("done",),
        act=actions.lose_node_before_begin,
        before_begin=True,
        commands={"python3": '[[ -e "${provoked}" ]] || { touch "${provoked}"; sleep 1000; }'},
    ),
    Fault(
        name="controller-confused",
        what="scontrol and squeue fail with an error that nobody knows, twice in every job",
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
    ),
    Fault(
        name="watch-killed",
        what="SIGKILL of the supervisor's watch, then a rank hangs",
        causes=("hang", "done"),
        act=actions.kill_watch,
        config={"chain": {"hang_timeout": 5}},
        says="ranks 1 did not answer",
        logged="watch ended (exit code 137); it starts again",
    ),
    Fault(
        name="watch-blind",
        what="a view that cannot be written and a torn heartbeat, then a rank hangs",
        causes=("hang", "done"),
        act=actions.disable_watch,
        config={"chain": {"hang_timeout": 5}},
        says="ranks 1 did not answer",
        logged="the merged views: left for later",
    ),
    Fault(
        name="one-submitted-job",
        what="a limit of one submitted job",
        causes=("failed", "done"),
        inject="crash-at=15",
        commands={
            "sbatch": """
touch "${provoked}"
echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
exit 1"""
        },
        logged="no successor yet: sbatch: sbatch: error: QOSMaxSubmitJobPerUserLimit",
    ),
    Fault(
        name="submission-misreported",
        what="sbatch queues the job and reports an error",
        causes=("failed", "done"),
        inject="crash-at=15",
        commands={
            "sbatch": """
touch "${provoked}"
"${real}" "$@" >/dev/null
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1"""
        },
    ),
    Fault(
        name="end-killed",
        what="SIGKILL of end and of the batch script before STOP, with an exit asked for",
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
        long=False,
    ),
    Fault(
        name="begin-killed",
        what="SIGKILL of begin before begin.json, behind an attempt that nobody closed",
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
    ),
    Fault(
        name="batch-script-killed-at-begin",
        what="SIGKILL of the batch script inside begin, which has queued nothing",
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
    ),
    Fault(
        name="successor-cancelled",
        what="scancel of the waiting successor",
        causes=("saved",),
        act=actions.cancel_successor,
        says=", was cancelled",
        long=False,
    ),
    Fault(
        name="successor-held",
        what="a person holds the waiting successor, and the attempt fails",
        causes=("failed", "done"),
        inject="crash-at=5",
        act=actions.hold_successor,
    ),
    Fault(
        name="view-unreadable",
        what="the merged metrics cannot be read when a job begins",
        causes=("saved", "done"),
        act=actions.block_metrics_view,
        logged="the merged views: left for later",
    ),
    Fault(
        name="take-over-refused",
        what="another user's take-over writes the plan while a job begins, finds its attempt, and puts the plan back",
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
    ),
)


PROGRAM_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="rank-killed",
        what="SIGKILL of a rank after a checkpoint",
        causes=("failed", "done"),
        act=actions.kill_rank,
        long=False,
    ),
    Fault(
        name="crash-loop",
        what="an exception before the first step, every time",
        causes=("failed", "failed"),
        inject="crash-at-once",
        config={"chain": {"max_failed_attempts": 2}},
        act=actions.start_next_job_now,
        says="2 attempts in a row without a new durable iteration",
        long=False,
    ),
    Fault(
        name="crash-after-progress",
        what="an exception on all ranks after a checkpoint",
        causes=("failed", "done"),
        inject="crash-at=15",
    ),
    Fault(
        name="loss-nan",
        what="the loss becomes NaN on one rank, training.on_nan: stop",
        causes=("fatal",),
        inject="nan-sample=100",
        says="loss nan, gradient norm nan",
        long=False,
    ),
    Fault(
        name="rank-stopped",
        what="SIGSTOP of a rank",
        causes=("hang", "done"),
        act=actions.stop_rank,
        config={"chain": {"hang_timeout": 5}},
        says="ranks 1 did not answer",
    ),
    Fault(
        name="rank-asleep",
        what="one rank sleeps, the others wait in a collective",
        causes=("hang", "done"),
        inject="sleep-at=15:1",
        config={"chain": {"hang_timeout": 5}},
        says="all ranks answered, others wait for rank 1 in",
    ),
    Fault(
        name="killed-while-staging",
        what="SIGKILL while .staging holds bytes and no commit",
        causes=("failed", "done"),
        inject="publish-delay=10",  # time to reach the nodes
        act=actions.kill_while_staging,
    ),
    Fault(
        name="latest-torn",
        what="the newest checkpoint is torn",
        causes=("failed", "done"),
        act=actions.tear_latest,
        long=False,
    ),
    Fault(
        name="tracker-missing",
        what="latest_checkpointed_iteration.txt is gone",
        causes=("failed", "done"),
        act=actions.lose_tracker,
    ),
    Fault(
        name="module-missing",
        what="a module that no node has",
        causes=("failed", "failed"),
        config={"chain": {"max_failed_attempts": 2}, "cluster": {"modules": ["no/such"]}},
        act=actions.start_next_job_now,
        says="module load no/such failed",
    ),
    Fault(
        name="setup-fails",
        what="a line of job.setup that fails",
        causes=("fatal",),
        config={"job": {"setup": ["ls /no/such/site"]}},
        says="job.setup failed (exit code 2) at: ls /no/such/site",
    ),
    Fault(
        name="python-missing",
        what="a Python that no node has",
        causes=("fatal",),
        config={"cluster": {"python": "no-such-python"}},  # the submit checks absolute paths itself
        says="no-such-python is not found on any rank",
    ),
    Fault(
        name="disk-full",
        what="no space during a save, space again later",
        needs=FaultRequirement.ROOT,
        causes=("done",),
        act=actions.fill_disk,
        small_disk="checkpoints",
    ),
    Fault(
        name="overtaken",
        what="an attempt stopped inside its save goes on beside its successor",
        needs=FaultRequirement.ROOT,
        causes=("unknown", "done"),
        inject="publish-delay=2",
        act=actions.revive_replaced_attempt,
    ),
    Fault(
        name="commit-full",
        what="no space for the commit line, twice for one iteration, then space again",
        causes=("saved", "done"),
        inject="commit-full=2",
        act=actions.ask_to_leave,
        config={"checkpoint": {"interval": 1000}},
        logged="SAVE FAILED at iteration",
    ),
)


FAULTS: tuple[Fault, ...] = (*PROGRAM_FAULTS, *JOB_FAULTS)
FAULTS_BY_NAME = {fault.name: fault for fault in FAULTS}
