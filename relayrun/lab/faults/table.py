"""The table of faults: for each fault its action on a chain, and the required end of the chain.

`resumed`: the run finishes, and every loss and every tensor equals that of the undisturbed run. `stopped`: the chain
ends, states the reason in STOP, and leaves no job in the queue. Tests and `relayrun drill` read the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Literal

from relayrun.lab.faults import actions
from relayrun.lab.faults.target import ClusterUnderTest


class RequiredPrivilege(Enum):
    """Rights that a fault needs beyond a user's; the value explains why it is left out without them."""

    CONTROL = "it ends daemons of Slurm or changes slurm.conf: only on a test cluster"
    PARTITIONS = "it needs two partitions, of which one takes the nodes of the other: only on a test cluster"
    ROOT = "it needs root's rights, for a small file system or to stop slurmstepd: only on a test cluster, by root"


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    name: str
    what: str
    causes: Sequence[str]
    """Required causes of the attempts' ends, in order; see `AttemptEnd.cause`. `a|b`: either."""
    act: Callable[[ClusterUnderTest], None] = actions.do_nothing
    """Called when the first attempt has begun."""
    _: KW_ONLY
    before_begin: bool = False
    """Call `act` right after the submit: it keeps the first attempt from beginning."""
    inject: str = ""
    """Faults for `relayrun.lab.faults.injection.FaultInjectionHook`, in every rank."""
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
    needs: RequiredPrivilege | None = None
    """None: any user who may submit jobs can inject it."""
    long: bool = True
    """The test waits for Slurm's own timers."""

    @property
    def expect(self) -> Literal["resumed", "stopped"]:
        """The required end of the chain, which follows from the last cause."""
        return "resumed" if self.causes[-1] == "done" else "stopped"


CONTROL, PARTITIONS, ROOT = RequiredPrivilege
FAILED_ONCE, HUNG_ONCE, SAVED_ONCE = ("failed", "done"), ("hang", "done"), ("saved", "done")
KILLED_ONCE = ("saved|unknown", "done")
LOW_PARTITION = {"job": {"partition": "low"}}
REQUEUE_MODE = {"chain": {"mode": "requeue"}}
SHORT_HANG = {"chain": {"hang_timeout": 5}}
TWO_FAILURES = {"chain": {"max_failed_attempts": 2}}

NO_SUPERVISOR = """
[[ -s "${provoked}" ]] || echo "${SLURMD_NODENAME}" >"${provoked}"
[[ "$(<"${provoked}")" != "${SLURMD_NODENAME}" ]] || { echo "No module named relayrun" >&2; exit 1; }"""
FAILS_TWICE_IN_A_JOB = """
echo >>"${provoked}"
job="$(tr '\\0' '\\n' <"/proc/${PPID}/environ" | sed -n 's/^SLURM_JOB_ID=//p')"
echo >>"${provoked}-${real##*/}-${job}"
if (($(wc -l <"${provoked}-${real##*/}-${job}") < 3)); then
  echo "slurm_load: Protocol version has changed, or so" >&2
  exit 1
fi"""
SUBMIT_LIMIT = """
touch "${provoked}"
echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
exit 1"""
LOST_ANSWER = """
touch "${provoked}"
"${real}" "$@" >/dev/null
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1"""
KILL_BATCH_SCRIPT = """echo "${SLURM_JOB_ID}" >"${provoked}.tmp"
  mv "${provoked}.tmp" "${provoked}"
  kill -KILL "${PPID}"
  sleep 1000"""
AT_END = '[[ " $* " == *" relayrun.control.chain end "* ]]'
AT_SECOND_BEGIN = """[[ " $* " == *" relayrun.control.chain begin "* &&
  -e "${RELAYRUN_RUN_DIR}/attempts/0001" && ! -e "${provoked}" ]]"""


def _supervisor(condition: str, action: str) -> dict[str, str]:
    """Bash in the place of the supervisor's Python that acts if a condition holds."""
    return {"python3": f"if {condition}; then\n  {action}\nfi"}


def _supervisor_fault(condition: str, fault: str) -> dict[str, str]:
    """Bash that runs the supervisor with a fault of `supervisor_faults` if a condition holds."""
    program = f'exec "${{real}}" -m relayrun.lab.faults.supervisor_faults {fault} "$@"'
    return _supervisor(condition, f'touch "${{provoked}}"\n  {program}')


UNDISTURBED = Fault("undisturbed", "nothing: what the others are compared with", ("done",))
"""The run without a fault."""

JOB_FAULTS: tuple[Fault, ...] = (
    Fault("batch-script-killed", "SIGKILL of the batch script", KILLED_ONCE, actions.kill_batch_script, long=False),
    Fault(
        "batch-script-killed-requeue",
        "the same in requeue mode",
        KILLED_ONCE,
        actions.kill_batch_script_under_guard,
        config=REQUEUE_MODE,
    ),
    Fault("cancelled", "scancel of the running job", ("cancelled",), actions.cancel, says="cancelled", long=False),
    Fault(
        "cancelled-unseen",
        "scancel while the batch script cannot see it",
        ("cancelled",),
        actions.cancel_after_killing_the_batch_script,
        says="cancelled",
    ),
    Fault(
        "preempted",
        "a job of a higher partition takes the nodes",
        SAVED_ONCE,
        actions.preempt,
        needs=PARTITIONS,
        config=LOW_PARTITION,
    ),
    Fault(
        "preempted-requeue",
        "the same in requeue mode",
        SAVED_ONCE,
        actions.preempt,
        needs=PARTITIONS,
        config=LOW_PARTITION | REQUEUE_MODE,
    ),
    Fault(
        "node-lost",
        "slurmd of a node killed",
        ("saved|failed|unknown", "done"),
        actions.kill_node,
        needs=CONTROL,
        inject="step-delay=1.5",
    ),
    Fault(
        "controller-down-at-submission",
        "slurmctld away for 60 s when the successor is queued",
        ("done",),
        actions.controller_down_at_submission,
        needs=CONTROL,
    ),
    Fault(
        "controller-down-at-exit",
        "slurmctld away for 60 s when the job ends",
        SAVED_ONCE,
        actions.controller_down_at_exit,
        needs=CONTROL,
    ),
    Fault(
        "predecessor-completing",
        "a slow epilog: the predecessor stays COMPLETING, and its successor is lost",
        ("saved", "saved|unknown", "done"),
        actions.hold_job_in_completing,
        needs=CONTROL,
    ),
    Fault(
        "supervisor-missing",
        "one node where the supervisor cannot start",
        ("done",),
        actions.start_next_job_now,
        commands={"python3": NO_SUPERVISOR},
        logged="begin failed in job",
    ),
    Fault(
        "run-directory-read-only",
        "the run directory is read-only for a while when a job begins",
        SAVED_ONCE,
        actions.read_only_between_jobs,
        needs=ROOT,
        small_disk=".",
        logged="begin failed in job",
    ),
    Fault(
        "node-lost-at-begin",
        "a node lost with its batch script, before anything is queued",
        ("done",),
        actions.lose_node_before_begin,
        needs=CONTROL,
        before_begin=True,
        commands={"python3": '[[ -e "${provoked}" ]] || { touch "${provoked}"; sleep 1000; }'},
    ),
    Fault(
        "controller-confused",
        "scontrol and squeue fail with an error that nobody knows, twice in every job",
        FAILED_ONCE,
        inject="crash-at=15",
        commands=dict.fromkeys(("scontrol", "squeue"), FAILS_TWICE_IN_A_JOB),
    ),
    Fault(
        "watch-killed",
        "SIGKILL of the supervisor's watch, then a rank hangs",
        HUNG_ONCE,
        actions.kill_watch,
        config=SHORT_HANG,
        says="ranks 1 did not answer",
        logged="watch ended (exit code 137); it starts again",
    ),
    Fault(
        "watch-blind",
        "a view that cannot be written and a torn heartbeat, then a rank hangs",
        HUNG_ONCE,
        actions.disable_watch,
        config=SHORT_HANG,
        says="ranks 1 did not answer",
        logged="the merged views: left for later",
    ),
    Fault(
        "one-submitted-job",
        "a limit of one submitted job",
        FAILED_ONCE,
        inject="crash-at=15",
        commands={"sbatch": SUBMIT_LIMIT},
        logged="no successor yet: sbatch: sbatch: error: QOSMaxSubmitJobPerUserLimit",
    ),
    Fault(
        "submission-misreported",
        "sbatch queues the job and reports an error",
        FAILED_ONCE,
        inject="crash-at=15",
        commands={"sbatch": LOST_ANSWER},
    ),
    Fault(
        "end-killed",
        "SIGKILL of end and of the batch script before STOP, with an exit asked for",
        ("exit",),
        actions.ask_to_exit,
        commands=_supervisor_fault(AT_END, "kill-with-parent STOP"),
        says="exit trigger by",
        logged="killed before STOP",
        long=False,
    ),
    Fault(
        "begin-killed",
        "SIGKILL of begin before begin.json, behind an attempt that nobody closed",
        KILLED_ONCE,
        actions.kill_begin,
        config={"chain": {"max_failed_attempts": 1}},
        commands=_supervisor_fault(AT_SECOND_BEGIN, "kill begin.json"),
        logged="killed before begin.json",
    ),
    Fault(
        "batch-script-killed-at-begin",
        "SIGKILL of the batch script inside begin, which has queued nothing",
        SAVED_ONCE,
        actions.kill_batch_script_at_begin,
        commands=_supervisor(AT_SECOND_BEGIN, KILL_BATCH_SCRIPT),
        logged="failed and left no successor; job",
    ),
    Fault(
        "successor-cancelled",
        "scancel of the waiting successor",
        ("saved",),
        actions.cancel_successor,
        says=", was cancelled",
        long=False,
    ),
    Fault(
        "successor-held",
        "a person holds the waiting successor, and the attempt fails",
        FAILED_ONCE,
        actions.hold_successor,
        inject="crash-at=5",
    ),
    Fault(
        "view-unreadable",
        "the merged metrics cannot be read when a job begins",
        SAVED_ONCE,
        actions.block_metrics_view,
        logged="the merged views: left for later",
    ),
)

PROGRAM_FAULTS: tuple[Fault, ...] = (
    Fault("rank-killed", "SIGKILL of a rank after a checkpoint", FAILED_ONCE, actions.kill_rank, long=False),
    Fault(
        "crash-loop",
        "an exception before the first step, every time",
        ("failed", "failed"),
        actions.start_next_job_now,
        inject="crash-at-once",
        config=TWO_FAILURES,
        says="2 attempts in a row without a new durable iteration",
        long=False,
    ),
    Fault("crash-after-progress", "an exception on all ranks after a checkpoint", FAILED_ONCE, inject="crash-at=15"),
    Fault(
        "loss-nan",
        "the loss becomes NaN on one rank, training.on_nan: stop",
        ("fatal",),
        inject="nan-sample=100",
        says="loss nan, gradient norm nan",
        long=False,
    ),
    Fault(
        "rank-stopped",
        "SIGSTOP of a rank",
        HUNG_ONCE,
        actions.stop_rank,
        config=SHORT_HANG,
        says="ranks 1 did not answer",
    ),
    Fault(
        "rank-asleep",
        "one rank sleeps, the others wait in a collective",
        HUNG_ONCE,
        inject="sleep-at=15:1",
        config=SHORT_HANG,
        says="all ranks answered, others wait for rank 1 in",
    ),
    Fault(
        "stranger",
        "a process without the secret of the attempt tries all ports of the job",
        ("done",),
        actions.let_stranger_try,
        config={"chain": {"recovery": "node"}},
        logged="refused connections to this job: ",
    ),
    Fault(
        "killed-while-staging",
        "SIGKILL while .staging holds bytes and no commit",
        FAILED_ONCE,
        actions.kill_while_staging,
        inject="publish-delay=10",
    ),  # time to reach the nodes
    Fault("latest-torn", "the newest checkpoint is torn", FAILED_ONCE, actions.tear_latest, long=False),
    Fault("tracker-missing", "latest_checkpointed_iteration.txt is gone", FAILED_ONCE, actions.lose_tracker),
    Fault(
        "module-missing",
        "a module that no node has",
        ("failed", "failed"),
        actions.start_next_job_now,
        config=TWO_FAILURES | {"cluster": {"modules": ["no/such"]}},
        says="module load no/such failed",
    ),
    Fault(
        "setup-fails",
        "a line of job.setup that fails",
        ("fatal",),
        config={"job": {"setup": ["ls /no/such/site"]}},
        says="job.setup failed (exit code 2) at: ls /no/such/site",
    ),
    Fault(
        "python-missing",
        "a Python that no node has",
        ("fatal",),
        config={"cluster": {"python": "no-such-python"}},
        says="no-such-python is not found on any rank",
    ),  # the submit checks absolute paths itself
    Fault(
        "disk-full",
        "no space during a save, space again later",
        ("done",),
        actions.fill_disk,
        needs=ROOT,
        small_disk="checkpoints",
    ),
    Fault(
        "overtaken",
        "an attempt stopped inside its save goes on beside its successor",
        ("unknown", "done"),
        actions.revive_replaced_attempt,
        needs=ROOT,
        inject="publish-delay=2",
    ),
    Fault(
        "commit-full",
        "no space for the commit line, twice for one iteration, then space again",
        SAVED_ONCE,
        actions.signal_save_and_exit,
        inject="commit-full=2",
        config={"checkpoint": {"interval": 1000}},
        logged="SAVE FAILED at iteration",
    ),
)

FAULTS: tuple[Fault, ...] = (*PROGRAM_FAULTS, *JOB_FAULTS)
FAULTS_BY_NAME = {fault.name: fault for fault in FAULTS}
