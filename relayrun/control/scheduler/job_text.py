"""A job as `scontrol show job --oneliner` writes it: fields, and between them what people wrote, unescaped.

    JobId=1 JobName=TEXT UserId=... Account=... JobState=... NodeList=... Network=TEXT Command=TEXT
    WorkDir=TEXT Comment=TEXT StdErr=TEXT StdIn=TEXT StdOut=TEXT Power=... TresPerNode=...

A name, comment, argument or path may hold ` JobState=COMPLETED`. So fields are read between the name and the network
(or the command) alone, where Slurm puts accounts into small letters. What follows all texts is read from the end. Where
the name may hold the fields as well, the caller asks Slurm for the name: then there is a second ` UserId=`.
"""

from __future__ import annotations

import re
import time

from relayrun.control.scheduler.base import Job, is_live_state
from relayrun.slurmtime import parse_time

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
    """Return the job of one line of `scontrol show job --oneliner`; `name`: its name, where `is_ambiguous`."""
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
