"""Slurm's commands: how they are started, how their errors and their output are read, and the options of sbatch.

`run_slurm_command` starts one command with a time limit and turns its failure into an error class.

`parse_job` reads a job as `scontrol show job --oneliner` prints it, where texts of users are not escaped:

    JobId=1 JobName=TEXT UserId=... Account=... JobState=... NodeList=... Network=TEXT Command=TEXT
    WorkDir=TEXT Comment=TEXT StdErr=TEXT StdIn=TEXT StdOut=TEXT Power=... TresPerNode=...

A name, comment, argument or path may contain ` JobState=COMPLETED`. So fields are read only between the name and the
network (or the command), where Slurm writes accounts in small letters; fields behind all texts are read from the end.
If the name itself may contain fields, there is a second ` UserId=`, and the caller asks Slurm for the name.

`check_sbatch_options` knows the options of the installed sbatch, plugins of the site included, or a list kept here.
GPUs are requested by `--gpus-per-node` or by another option, never by two options.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence

from relayrun.control.scheduler.base import Job, clean_environment, is_live_state
from relayrun.errors import ConfigError, SchedulerError
from relayrun.slurmtime import parse_time


def asks_for_gpus(options: Mapping[str, str | None]) -> bool:
    """Whether one of these options asks for GPUs, so that `--gpus-per-node` must not."""
    by_name = any(name in options for name in ("gpus", "gpus-per-task", "gpus-per-socket"))
    listed = f"{options.get('gres') or ''},{options.get('tres-per-task') or ''}"
    return by_name or any(_is_gpu_resource(part) for part in listed.split(","))


def gres_with_gpus(gres: str, gpus: str) -> str:
    """The option `gres` with other GPUs: their number, or type and number; without GPUs where `gpus` is 0.

    A type in `gres` stays where `gpus` names none.
    """
    parts = []
    for part in gres.split(","):
        if not _is_gpu_resource(part):
            parts.append(part)
        elif gpus != "0":
            kind = [word for word in part.partition("(")[0].split(":")[1:] if not word.isdecimal()]
            parts.append(":".join(["gpu", *(kind if gpus.isdecimal() else []), gpus]))
    return ",".join(parts)


def gpu_options_like_script(options: Mapping[str, str], script: Mapping[str, str | None]) -> dict[str, str]:
    """A job's options, read back from Slurm, for a script whose own options ask for GPUs in their way."""
    found = dict(options)
    if "gpus-per-node" in found and asks_for_gpus(script):
        gpus = found.pop("gpus-per-node").partition("(")[0]
        if gres := script.get("gres"):
            found["gres"] = gres_with_gpus(gres, gpus)
    return found


def _is_gpu_resource(part: str) -> bool:
    return re.match(r"(gres[/:])?gpu\b", part) is not None


COMMENT_PREFIX = "relayrun:"
"""Begins the comment of every job that is submitted here; a word of the job's own follows."""

BEGIN_FAILED_COMMENT = f"{COMMENT_PREFIX}begin-failed="
"""Begins the comment of a job whose `begin` failed; `launchers/lib/again.sh` writes `COUNT@NODES` behind it."""

STOPPED_BY_COMMENT = f"{COMMENT_PREFIX}stopped-by="
"""Begins the comment of a job whose chain a person has ended; the user follows. `launchers/lib/again.sh` reads it."""

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
"""Fields of scontrol whose values hold for successors, with the option that sets them. Memory and GPUs too."""


def is_job_text_ambiguous(text: str) -> bool:
    """Whether only the job's name, from elsewhere, tells where its fields begin."""
    return text.count(" UserId=") > 1


def job_fields(text: str, *, name: str | None = None) -> dict[str, str]:
    """The fields of one job, without those that have no value; `name`: the job's, if it is known.

    `JobName` is whole. `Comment` is there where it is one word, as ours are.
    """
    start, known = _after_name(text, name)
    texts = re.compile(r" (?:Network|Command)=").search(text, start)
    core, rest = (text[start:], "") if texts is None else (text[start : texts.start()], text[texts.start() :])
    for field, value in _FIELD.findall(core):
        known.setdefault(field, value)
    if comment := re.search(r" Comment=(\S*) +StdErr=|.* Comment=(\S*)\s*$", rest):
        known["Comment"] = comment[1] or comment[2] or ""  # one that was emptied is shown as such
    tail = rest[max(rest.rfind(" Power="), rest.rfind(" StdOut="), 0) :]
    for field, value in _FIELD.findall(tail):
        if field.startswith("TresPer"):
            known.setdefault(field, value)
    return {field: value for field, value in known.items() if value not in ("", "(null)")}


_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9/:_]*)=(\S*)")


def _after_name(text: str, name: str | None) -> tuple[int, dict[str, str]]:
    """Where what follows the name begins, and the fields before."""
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


def parse_job(text: str, *, name: str | None = None) -> Job:
    """Return the job of one line of `scontrol show job --oneliner`; `name`: its name, where `is_job_text_ambiguous`."""
    known = job_fields(text, name=name)
    options = {option: known[field] for field, option in _KEPT_OPTIONS.items() if field in known}
    if "MinMemoryCPU" in known:
        options["mem-per-cpu"] = known["MinMemoryCPU"]
    elif known.get("MinMemoryNode", "0") != "0":
        options["mem"] = known["MinMemoryNode"]
    if gpus := re.search(r"(?:gres[:/])?gpu[:=](\S+)", known.get("TresPerNode", "")):
        options["gpus-per-node"] = gpus[1]
    start, end = parse_timestamp(known.get("StartTime", "")), parse_timestamp(known.get("EndTime", ""))
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
        start_time=None if state == "PENDING" else start,  # until then it is a guess
        options=options,
        at_limit=known.get("Reason") == "TimeLimit"  # also of a job whose reservation was over
        or (start is not None and end is not None and limit is not None and end - start >= limit),
        preempted=known.get("PreemptTime", "None") != "None",
        requeue=known.get("Requeue") == "1",
        stopped_by=comment.removeprefix(STOPPED_BY_COMMENT) if comment.startswith(STOPPED_BY_COMMENT) else "",
        failed_begins=int(failed[1]) if failed else 0,
        begin_failed_on=failed[2] if failed else "",
    )


def parse_timestamp(text: str) -> float | None:
    """Seconds since 1970 of one of Slurm's times, which are such seconds or local ones; None where it is none."""
    if text.isdecimal():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


class NotInstalledError(SchedulerError):
    """Slurm's commands are not on this machine."""


class NoAnswerError(SchedulerError):
    """The command failed in a way that another try may mend: it says nothing about what was asked."""


class TimedOutError(NoAnswerError):
    """The command took longer than it may."""


class TooManyJobsError(SchedulerError):
    """So many jobs are there that Slurm takes no more now."""


COMMANDS_WITH_TIMES = ("sacct", "scontrol", "squeue")
"""Commands whose times a program reads; those of `sbatch --test-only` are for people."""
EPOCH_TIME_FORMAT = {"SLURM_TIME_FORMAT": "%s"}
"""Times are seconds since 1970: local ones come twice in the night in which summer time ends."""

_NO_ANSWER = re.compile(
    r"Unable to contact|Connection (refused|reset)|timed out|Zero Bytes|Transport endpoint|backup|authentication"
    r"|munge|temporarily|try again|Socket|No route|Unable to establish|Cannot allocate",
    re.I,
)
"""What an order that did not reach the controller, or whose answer was lost, is known to say."""

_TOO_MANY = re.compile(r"(Max|Grp)Submit")
"""What sbatch says where the number of jobs is the trouble, and not the job."""


def run_slurm_command(command: Sequence[str], lines: Sequence[str] = (), *, seconds: float, words: bool = False) -> str:
    """Run one command, for at most so many seconds; return what it printed.

    `lines`: orders for its standard input. `words`: return what it said on standard error, too. Raises
    NotInstalledError, TimedOutError, NoAnswerError, TooManyJobsError, or a plain SchedulerError where Slurm refused.
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
    except OSError as error:  # no memory or no process for the command
        raise NoAnswerError(f"{command[0]}: {error}") from None
    if done.returncode == 0 and not (lines and done.stderr):  # it says of the last order alone how it went
        return done.stdout + done.stderr if words else done.stdout
    message = done.stderr.strip() or f"exit code {done.returncode}"
    if done.returncode < 0 or _NO_ANSWER.search(message):
        raise NoAnswerError(f"{command[0]}: {message}")
    kind = TooManyJobsError if _TOO_MANY.search(message) else SchedulerError
    raise kind(f"{command[0]}: {message}")


KNOWN_SBATCH_VERSION = "22.05.8"
"""The Slurm whose options stand in KNOWN."""

_SBATCH_OPTIONS = """
    account array bb bbf begin chdir cluster-constraint clusters comment constraint container contiguous core-spec
    cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
    exclusive export export-file extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket
    gpus-per-task gres gres-flags help hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user
    mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes
    ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output overcommit oversubscribe
    parsable partition power priority profile propagate qos quiet reboot requeue reservation signal sockets-per-node
    spread-job switches test-only thread-spec threads-per-core time time-min tmp uid usage use-min-nodes verbose version
    wait wait-all-nodes wckey wrap
"""

KNOWN_SBATCH_OPTIONS = frozenset(_SBATCH_OPTIONS.split())

_SBATCH_HELP_SECONDS = 20.0


def option_names_in(text: str) -> frozenset[str]:
    """Long names of options in what `sbatch --help` or `sbatch --usage` prints."""
    return frozenset(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", text))


@functools.cache
def installed_sbatch_options() -> frozenset[str] | None:
    """The options of the sbatch that is installed here; None where there is none, or it prints no list."""
    try:
        texts = [
            run_slurm_command(["sbatch", option], seconds=_SBATCH_HELP_SECONDS) for option in ("--help", "--usage")
        ]
    except SchedulerError:  # not installed, or without the file that names its cluster
        return None
    names = option_names_in("\n".join(texts))
    return names | _UNLISTED_SBATCH_OPTIONS if "job-name" in names else None


_UNLISTED_SBATCH_OPTIONS = frozenset(
    {"kill-on-invalid-dep", "mem-bind", "network", "ntasks-per-gpu", "open-mode", "wait-all-nodes"}
)
"""Options that every sbatch takes and not every one lists."""


def check_sbatch_options(names: Iterable[str], *, where: str) -> None:
    """Raise ConfigError, with the nearest name, for the first that sbatch does not have. `where`: the setting."""
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
