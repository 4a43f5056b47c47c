"""Slurm's commands: how they are started, how their errors and their output are read, and the options of sbatch.

`parse_job` reads a job as `scontrol show job --oneliner` prints it, where texts of users are not escaped:

    JobId=1 JobName=TEXT UserId=... Account=... JobState=... NodeList=... Network=TEXT Command=TEXT
    SubmitLine=TEXT WorkDir=TEXT Comment=TEXT StdErr=TEXT StdIn=TEXT StdOut=TEXT Power=... TresPerNode=...

(`SubmitLine` since Slurm 25.11, no `Power` since 24.05.) A text may contain ` JobState=COMPLETED`. So fields are read
only between the name and the network (or the command), where Slurm writes accounts in small letters. If the name or
the path of the output may contain fields, the caller asks Slurm for the name or the GPUs alone.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from relayrun.control.scheduler.base import CONTROLLER_PATIENCE, Job, clean_environment, is_live_state
from relayrun.control.scheduler.slurm_states import reason_of
from relayrun.errors import ConfigError, SchedulerError
from relayrun.slurmtime import parse_time

log = logging.getLogger(__name__)


def asks_for_gpus(options: Mapping[str, str | None]) -> bool:
    """True if one of these options requests GPUs; `--gpus-per-node` must not be given beside it."""
    by_name = any(name in options for name in ("gpus", "gpus-per-task", "gpus-per-socket"))
    return by_name or count_gpus(f"{options.get('gres') or ''},{options.get('tres-per-task') or ''}") > 0


def count_gpus(gres: str) -> int:
    """Return the GPUs in `gpu:4`, `gres/gpu=4`, `gpu:a100:4(S:0-1),nvme:1`, or `gpu`."""
    return sum(int(count or 1) for count in _GPUS.findall(gres))


_GPUS = re.compile(r"\bgpu(?:[:=][^:=,(]*[a-zA-Z][^:=,(]*)?(?:[:=](\d+))?(?=[,(]|$)")


def gres_with_gpus(gres: str, gpus: str) -> str:
    """Return `gres` with other GPUs, a number or type and number; 0: without GPUs. A bare number keeps the type."""
    parts = []
    for part in gres.split(","):
        if not re.match(r"(gres[/:])?gpu\b", part):
            parts.append(part)
        elif gpus != "0":
            kind = [word for word in part.partition("(")[0].split(":")[1:] if not word.isdecimal()]
            parts.append(":".join(["gpu", *(kind if gpus.isdecimal() else []), gpus]))
    return ",".join(parts)


def gpu_options_like_script(options: Mapping[str, str], script: Mapping[str, str | None]) -> dict[str, str]:
    """Return a job's options, read back from Slurm, with GPUs requested in the way of the script's own options."""
    found = dict(options)
    if "gpus-per-node" in found and asks_for_gpus(script):
        gpus = found.pop("gpus-per-node").partition("(")[0]
        if gres := script.get("gres"):
            found["gres"] = gres_with_gpus(gres, gpus)
    return found


_MEMORY_VARIABLES = {"SLURM_MEM_PER_CPU": "mem-per-cpu", "SLURM_MEM_PER_NODE": "mem", "SLURM_MEM_PER_GPU": ""}


def foreign_variables(options: Mapping[str, str], srun_options: Sequence[str]) -> list[str]:
    """Return srun's variables that do not belong to a job with these options: sbatch hands on those around it.

    srun accepts one kind of memory, GPUs in one way, and a time limit of its own. The processors of a task are among
    its options: it complains of more than the variables say.
    """
    names = ["SLURM_TIMELIMIT", "SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU"]
    if options.keys() & {"mem", "mem-per-cpu"}:
        names += [name for name, option in _MEMORY_VARIABLES.items() if option not in options]
    asked = dict(option.removeprefix("--").partition("=")[::2] for option in srun_options)
    if asks_for_gpus(asked) or "gpus-per-node" in asked:
        names += ["SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"]
    return names


COMMENT_PREFIX = "relayrun:"
"""Prefix of the comment of every job that relayrun submits; a unique word follows."""
BEGIN_FAILED_COMMENT = f"{COMMENT_PREFIX}begin-failed="
"""Prefix of the comment of a job whose `begin` failed; `launchers/lib/again.sh` appends `COUNT@NODES`."""
STOPPED_BY_COMMENT = f"{COMMENT_PREFIX}stopped-by="
"""Prefix of the comment of a job whose chain a person ended; the user follows. `launchers/lib/again.sh` reads it."""

_KEPT_OPTIONS = {
    "NumNodes": "nodes",
    "TimeLimit": "time",
    "Partition": "partition",
    "Account": "account",
    "QOS": "qos",
    "Reservation": "reservation",
    "Features": "constraint",
    "ExcNodeList": "exclude",
    "CPUs/Task": "cpus-per-task",
}
"""Fields of scontrol that apply to successors, with the option that sets them. Memory and GPUs are added below."""


def is_job_text_ambiguous(text: str) -> bool:
    """True if the text of a job can only be parsed with the job's name from another source."""
    return text.count(" UserId=") > 1


def are_gpus_ambiguous(text: str) -> bool:
    """True if what looks like a job's GPUs may belong to the path of its output. A chain's job writes to /dev/null."""
    _, output, tail = text.rpartition(" StdOut=")
    return bool(output) and " TresPer" in tail and (text.count(" StdOut=") > 1 or not tail.startswith("/dev/null "))


def job_fields(text: str, *, name: str | None = None, gpus: str = "") -> dict[str, str]:
    """Return the non-empty fields of one job. `name`: the job's name, if it is known; `gpus`: its `TresPerNode`, needed
    if `are_gpus_ambiguous`. `Comment` is present if it is one word, as relayrun's comments are."""
    start, known = _after_name(text, name)
    texts = re.compile(r" (?:Network|Command)=").search(text, start)
    core, rest = (text[start:], "") if texts is None else (text[start : texts.start()], text[texts.start() :])
    for field, value in _FIELD.findall(core):
        known.setdefault(field, value)
    if comment := re.search(r" Comment=(\S*) +StdErr=", rest) or re.search(r".* Comment=(\S*)\s*$", rest):
        known["Comment"] = comment[1]  # an emptied comment is shown as empty
    tail = (
        [("TresPerNode", gpus)] if are_gpus_ambiguous(text) else _FIELD.findall(rest[max(rest.rfind(" StdOut="), 0) :])
    )
    for field, value in tail:
        if field.startswith("TresPer"):
            known.setdefault(field, value)
    return {field: value for field, value in known.items() if value not in ("", "(null)")}


_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9/:_]*)=(\S*)")


def _after_name(text: str, name: str | None) -> tuple[int, dict[str, str]]:
    """Return the position behind the name, and the fields before it."""
    job_id = re.match(r"\s*JobId=(\d+)", text)
    known = {"JobId": job_id[1]} if job_id else {}
    begin = text.find(" JobName=")
    if begin < 0:
        return 0, known
    begin += len(" JobName=")
    end = text.find(" UserId=", begin)
    if name is not None and text.startswith(f"{name} UserId=", begin):
        end = begin + len(name)
    if end < 0:
        end = text.find(" ", begin)
    return end, known | {"JobName": text[begin:end]}


def parse_job(text: str, *, name: str | None = None, gpus: str = "") -> Job:
    """Parse one line of `scontrol show job --oneliner`; `name` and `gpus`: see `job_fields`."""
    known = job_fields(text, name=name, gpus=gpus)
    options = {option: known[field] for field, option in _KEPT_OPTIONS.items() if field in known}
    if "MinMemoryCPU" in known:
        options["mem-per-cpu"] = known["MinMemoryCPU"]
    elif known.get("MinMemoryNode", "0") != "0":
        options["mem"] = known["MinMemoryNode"]
    if count := re.search(r"(?:gres[:/])?gpu[:=](\S+)", known.get("TresPerNode", "")):
        options["gpus-per-node"] = count[1]
    start, end, preempted = (parse_timestamp(known.get(each, "")) for each in ("StartTime", "EndTime", "PreemptTime"))
    limit = None if known.get("TimeLimit", "UNLIMITED") == "UNLIMITED" else parse_time(known["TimeLimit"])
    state, comment = known.get("JobState", "UNKNOWN"), known.get("Comment", "")
    failed = re.match(rf"{BEGIN_FAILED_COMMENT}(\d+)@(.*)", comment)
    return Job(
        id=known["JobId"],
        name=known.get("JobName", ""),
        state=state,
        nodes=known.get("NodeList", ""),
        num_nodes=int(known.get("NumNodes", "1").partition("-")[0]),
        batch_host=known.get("BatchHost", ""),
        end_time=end if limit is not None or not is_live_state(state) else None,
        submit_time=parse_timestamp(known.get("SubmitTime", "")),
        eligible_time=parse_timestamp(known.get("EligibleTime", "")),
        start_time=None if state == "PENDING" else start,  # while pending it is Slurm's guess
        options=options,
        at_limit=known.get("Reason") == "TimeLimit"  # also for a job whose reservation ended
        or (start is not None and end is not None and limit is not None and end - start >= limit),
        ended_by_slurm=reason_of(known.get("Reason")).kind == "ended",
        preempted=preempted is not None and preempted >= (start or 0),  # an earlier one has come back
        requeue=known.get("Requeue") == "1",
        restarts=int(known.get("Restarts", "0")),
        of_chain=comment.startswith(COMMENT_PREFIX),
        stopped_by=comment.removeprefix(STOPPED_BY_COMMENT) if comment.startswith(STOPPED_BY_COMMENT) else "",
        failed_begins=int(failed[1]) if failed else 0,
        begin_failed_on=failed[2] if failed else "",
    )


def parse_timestamp(text: str) -> float | None:
    """Convert one of Slurm's times, seconds since 1970 or local time, to seconds since 1970; None if it is no time."""
    if text.isdecimal():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


class NotInstalledError(SchedulerError):
    """Slurm's commands are not installed on this machine."""


class NoAnswerError(SchedulerError):
    """The command failed in a way that a retry may mend; the error does not answer the question."""


class TimedOutError(NoAnswerError):
    """The command exceeded its time limit."""


class TooManyJobsError(SchedulerError):
    """Slurm accepts no more jobs now because of the number of jobs."""


COMMANDS_WITH_TIMES = ("sacct", "scontrol", "squeue")
"""Commands whose times a program reads; times of `sbatch --test-only` are for people."""
EPOCH_TIME_FORMAT = {"SLURM_TIME_FORMAT": "%s"}
"""Makes Slurm print times as seconds since 1970: local times are ambiguous in the night when summer time ends."""

_NO_ANSWER = re.compile(
    r"Unable to contact|Connection (refused|reset)|timed out|Zero Bytes|Transport endpoint|backup|authentication"
    r"|munge|temporarily|try again|Socket|No route|Unable to establish|Cannot allocate",
    re.I,
)
"""Messages of an order that did not reach the controller, or whose answer was lost."""

_TOO_MANY = re.compile(r"(Max|Grp)Submit")
"""Words of sbatch's message if the number of jobs is the reason for the refusal, and not the job."""


def run_slurm_command(command: Sequence[str], lines: Sequence[str] = (), *, seconds: float, words: bool = False) -> str:
    """Run one command for at most `seconds`; return its output.

    `lines`: orders for its standard input. `words`: also return its standard error. Raises NotInstalledError,
    TimedOutError, NoAnswerError, TooManyJobsError, or a plain SchedulerError for a refusal.
    """
    try:
        done = subprocess.run(
            command,
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            env=clean_environment(os.environ) | (EPOCH_TIME_FORMAT if command[0] in COMMANDS_WITH_TIMES else {}),
            check=False,
            timeout=seconds,
            errors="replace",
        )
    except FileNotFoundError:
        raise NotInstalledError(
            f"{command[0]} is not installed here",
            hint="submit from a login node of the cluster, or use `cluster: local`",
        ) from None
    except subprocess.TimeoutExpired:
        raise TimedOutError(f"{command[0]}: no answer within {seconds:.0f} s") from None
    except OSError as error:  # no memory or no free process slot
        raise NoAnswerError(f"{command[0]}: {error}") from None
    if done.returncode == 0 and not (lines and done.stderr):  # the exit code is that of the last order alone
        return done.stdout + done.stderr if words else done.stdout
    message = done.stderr.strip() or f"exit code {done.returncode}"
    if done.returncode < 0 or _NO_ANSWER.search(message):
        raise NoAnswerError(f"{command[0]}: {message}")
    kind = TooManyJobsError if _TOO_MANY.search(message) else SchedulerError
    raise kind(f"{command[0]}: {message}")


COMMAND_SECONDS = 120.0
"""Time limit of one command. A command that hangs would hold the nodes to the end of the job."""
SILENCE_SECONDS = 10.0
"""Seconds after which a person hears that a command has not answered."""


class SlurmCommands:
    """Questions and orders to Slurm, each with a time limit. For `patience` seconds a question is repeated after any
    error, and an order if the controller did not answer. `ordered`: a person gave an order, and waits for each command
    as long as a job does, with a line that says so."""

    def __init__(self, *, patience: float = CONTROLLER_PATIENCE, pause: float = 2.0, ordered: bool = False) -> None:
        self._patience = patience
        self._pause = pause
        self._ordered = ordered

    def ask(self, command: Sequence[str], *, answer: str = "") -> str:
        """Run a command that changes nothing, and repeat it after any error; return its output. Raises SchedulerError.
        `answer`: an error that contains these words is an answer and is raised."""
        return self._run(command, again=lambda error: not (answer and answer in error.message))

    def order(self, command: Sequence[str], lines: Sequence[str] = (), *, words: bool = False) -> str:
        """Run a command that changes something, and may safely run twice; return its output. It is repeated if the
        controller did not answer. `lines` and `words`: as in `run_slurm_command`."""
        return self._run(command, lines, words=words, again=lambda error: isinstance(error, NoAnswerError))

    def _run(
        self,
        command: Sequence[str],
        lines: Sequence[str] = (),
        *,
        again: Callable[[SchedulerError], bool],
        words: bool = False,
    ) -> str:
        deadline, pause = time.monotonic() + self._patience, self._pause
        while True:
            try:
                return self._once(command, lines, words=words)
            except NotInstalledError:
                raise
            except SchedulerError as error:
                if not again(error) or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 30.0)

    def _once(self, command: Sequence[str], lines: Sequence[str] = (), *, words: bool = False) -> str:
        if not self._ordered:
            seconds = min(COMMAND_SECONDS, max(10.0, self._patience))
            return run_slurm_command(command, lines, seconds=seconds, words=words)
        waits = "%s has not answered for %.0f s; waiting up to %.0f s"
        line = threading.Timer(SILENCE_SECONDS, log.info, (waits, command[0], SILENCE_SECONDS, COMMAND_SECONDS))
        line.daemon = True
        line.start()
        try:
            return run_slurm_command(command, lines, seconds=COMMAND_SECONDS, words=words)
        finally:
            line.cancel()

    def update_job(self, job_id: str, *changes: str) -> None:
        """Change fields of a job by `scontrol update`. Raises SchedulerError."""
        self.order(["scontrol", "update", f"JobId={job_id}", *changes])

    def test(self, script: Path, options: Mapping[str, str] | None = None) -> str:
        """Return what sbatch says of a script with these options, without queueing it. Raises SchedulerError."""
        further = [f"--{name}={value}" for name, value in (options or {}).items()]
        return self.order(["sbatch", "--test-only", *further, str(script)], words=True)

    def submit_once(self, arguments: Sequence[str], *, name: str, comment: str | None = None) -> str:
        """Queue one job exactly once, and return its id: sbatch may queue a job and report an error all the same.

        Each job has a unique comment (default: a random one), and a retry first looks for it and the `name`. Raises
        SchedulerError.
        """
        comment = comment or f"{COMMENT_PREFIX}{secrets.token_hex(6)}"
        command = ["sbatch", "--parsable", f"--comment={comment}", *arguments]
        deadline, pause = time.monotonic() + self._patience, self._pause
        while True:
            try:
                job_id = self._once(command).strip().split(";")[0]
                if not job_id.isdecimal():
                    raise SchedulerError(f"sbatch: no job id in its answer {job_id!r}")
                return job_id
            except SchedulerError as error:
                try:
                    rows = self.ask(["squeue", "--noheader", "--me", f"--name={name}", "--format=%i|%k"]).splitlines()
                except SchedulerError as unknown:
                    error.message += f"; whether it has queued the job is unknown: {unknown.message}"
                    error.hint = f"look with `squeue --me --name={name}`; scancel a job that is there, and try again"
                    raise error from None
                found = [row.partition("|")[0] for row in rows if row.partition("|")[2] == comment]
                if found:
                    return found[0]
                if not isinstance(error, NoAnswerError) or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 30.0)

    def jobs_named(self, name: str, *, anyone: bool = False) -> list[Job]:
        """Return the queued and running jobs with this name: this user's, or with `anyone` every user's."""
        whose = [] if anyone else ["--me"]
        text = self.ask(["squeue", "--noheader", *whose, f"--name={name}", "--format=%i|%j|%T"])
        rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
        return [Job(id=row[0], name=row[1], state=row[2]) for row in rows]


def own_cluster_name() -> str:
    """Return the name of the cluster whose Slurm answers here; empty if none does."""
    try:
        config = run_slurm_command(["scontrol", "show", "config"], seconds=SILENCE_SECONDS)
    except SchedulerError:
        return ""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.M)
    return found[1] if found else ""


KNOWN_SBATCH_VERSION = "26.05.5"
"""Slurm version of KNOWN_SBATCH_OPTIONS."""
_SBATCH_OPTIONS = """
    account array bb bbf begin chdir cluster-constraint clusters comment constraint container container-id
    container-type contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
    dependency distribution error exclude exclusive export export-file extra-node-info get-user-env gid gpu-bind
    gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help hold ignore-pbs input job-name
    licenses mail-type mail-user mcs-label mem mem-per-cpu mem-per-gpu mincpus nice no-kill no-requeue nodefile nodelist
    nodes ntasks ntasks-per-core ntasks-per-node ntasks-per-socket oom-kill-step output overcommit oversubscribe
    parsable partition power priority profile propagate qos quiet reboot requeue reservation resv-ports signal
    sockets-per-node spread-job spread-segments switches test-only thread-spec threads-per-core time time-min tmp
    tres-bind tres-per-task uid usage use-min-nodes verbose version wait wckey wrap
"""
_UNLISTED_SBATCH_OPTIONS = frozenset(
    {"acctg-freq", "batch", "consolidate-segments", "extra", "hint", "kill-on-invalid-dep", "mem-bind", "network"}
    | {"ntasks-per-gpu", "open-mode", "prefer", "segment", "stepmgr", "wait-all-nodes"}
)
"""Options that sbatch accepts but does not list; older versions refuse some."""
KNOWN_SBATCH_OPTIONS = frozenset(_SBATCH_OPTIONS.split()) | _UNLISTED_SBATCH_OPTIONS
_SBATCH_HELP_SECONDS = 20.0


def option_names_in(text: str) -> frozenset[str]:
    """Return the long option names in the output of `sbatch --help` or `sbatch --usage`."""
    return frozenset(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", text))


@functools.cache
def installed_sbatch_options() -> frozenset[str] | None:
    """Return the options of the installed sbatch; None if there is no sbatch or it prints no list."""
    try:
        texts = [
            run_slurm_command(["sbatch", option], seconds=_SBATCH_HELP_SECONDS) for option in ("--help", "--usage")
        ]
    except SchedulerError:  # not installed, or not configured
        return None
    names = option_names_in("\n".join(texts))
    return names | _UNLISTED_SBATCH_OPTIONS if "job-name" in names else None


def check_sbatch_options(names: Iterable[str], *, where: str) -> None:
    """Raise ConfigError, with the nearest name, for the first option that sbatch lacks. `where`: the setting."""
    names = list(names)
    if not names:
        return
    known, whose = installed_sbatch_options(), "the sbatch that is installed here"
    if known is None:
        known, whose = KNOWN_SBATCH_OPTIONS, f"sbatch {KNOWN_SBATCH_VERSION}"
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise ConfigError(
                f"{whose} has no option --{name}",
                where=f"{where}.{name}",
                hint=f"did you mean {near[0]}?" if near else "`sbatch --help` lists them",
            )
