"""Whether the checkpoints that a run keeps fit the file system, and the quota."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relayrun.rundir import purge
from relayrun.rundir.lineage import Lineage
from relayrun.rundir.run import Run
from relayrun.shards.made_by import sets_of
from relayrun.shards.manifest import Manifest
from relayrun.submit.check.finding import Findings
from relayrun.submit.check.place import existing
from relayrun.submit.forecast.forecast import Forecast, in_bytes

SECONDS = 10.0
"""How long a question for a quota may take."""
BLOCK = 1024
"""Bytes of a block, as `quota` and `lfs quota` count."""


@dataclass(frozen=True, kw_only=True)
class Quota:
    """What a user, or a group, may still write to a file system."""

    command: str
    """Who said it."""
    free_bytes: int | None
    """None: there is no limit."""
    free_files: int | None


def look(forecast: Forecast, run: Run, findings: Findings) -> None:
    """Compare what checkpoints take with what is free where the run directory lies."""
    place = existing(run.checkpoints)
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    already = 0
    for path in run.checkpoints.glob("iter_*/*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            already += path.stat().st_size
    one, kept = forecast.checkpoint.bytes, forecast.checkpoint.most_bytes
    name = "storage.space"
    words = f"{in_bytes(free)} free below {place}; a checkpoint has {in_bytes(one)}, all that are kept {in_bytes(kept)}"
    if free + already < one:
        findings.refuse(
            name,
            f"{words}: not one fits",
            where=place,
            value=free,
            remedy="free some space, or set run_dir to another file system",
        )
    elif free + already < kept:
        findings.warn(
            name,
            words,
            where=place,
            value=free,
            remedy="free some space, set run_dir to another file system, or lower checkpoint.keep_last",
        )
    else:
        findings.ok(name, words, value=free)
    if status.f_files and not status.f_favail:
        findings.refuse("storage.files", f"no file more can be made below {place}", where=place, value=0)
    for quota in quotas(place):
        _quota(quota, place, one, kept - already, findings)


def look_at_purges(purge_days: Mapping[str, float], run: Run, manifest: Manifest | None, findings: Findings) -> None:
    """Say what the site would remove of a run's newest checkpoint and of its data, and when; warn of the next week."""
    if not purge_days:
        return
    now = time.time()
    with findings.catching("storage.purge"):
        newest = Lineage(run).durable()
        every = [] if manifest is None else [shards for _, shards in sets_of(manifest, None)]
        paths = [f"{shard.prefix}.bin" for shards in every for shard in shards.shards]
        paths += [file.path for shards in every for file in shards.files if "://" not in file.path]
        found = [
            purge.of_checkpoint(newest.iteration, newest.path, purge_days),
            purge.foreseen("training data", "data", paths, purge_days),
        ]
        told = [each for each in found if each is not None]
        for each in told:
            if each.is_soon(now):
                findings.warn(
                    "storage.purge",
                    each.words(now),
                    value=each.time,
                    remedy="read it, or copy it to another file system (checkpoint.mirror, `relayrun runs archive`)",
                )
            else:
                findings.ok("storage.purge", each.words(now), value=each.time)
        if not told:
            rules = ", ".join(f"{folder} after {days:g} days" for folder, days in purge_days.items())
            findings.ok("storage.purge", f"nothing of the run is old enough, or lies there: {rules}")


def _quota(quota: Quota, place: Path, one: int, kept: int, findings: Findings) -> None:
    name, free = "storage.quota", quota.free_bytes
    if free is None:
        findings.ok(name, f"{quota.command}: no limit of bytes")
    else:
        words = f"{quota.command}: {in_bytes(max(free, 0))} left"
        if free < one:
            findings.warn(
                name, f"{words}, and not one checkpoint fits", where=place, value=free, remedy="free some space"
            )
        elif free < kept:
            findings.warn(name, f"{words}, and not all checkpoints that are kept fit", where=place, value=free)
        else:
            findings.ok(name, words, value=free)
    if quota.free_files is not None and quota.free_files < 1000:
        findings.warn(name, f"{quota.command}: {max(quota.free_files, 0)} files left", where=place)


def quotas(place: Path) -> list[Quota]:
    """What `lfs quota` or `quota` say of this user and file system.

    Where neither is there, or answers in a form that is not known, nobody knows: that is no error.
    """
    user = str(os.getuid())  # it may have no name here
    commands = (
        ["lfs", "quota", "-q", "-u", user, str(place)],
        ["quota", "--no-wrap", "--raw-grace", "-f", str(place)],
    )
    return [quota for command in commands if (quota := _ask(command)) is not None]


def _ask(command: Sequence[str]) -> Quota | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"LC_ALL": "C"},
        )
    except (subprocess.TimeoutExpired, OSError):
        return None
    return parse(" ".join(command[:2]), done.stdout)


def parse(command: str, text: str) -> Quota | None:
    """Read a table of `file system, blocks, quota, limit, grace, files, quota, limit, grace`; None: it is none.

    A block is 1,024 bytes, a `*` behind a number says that it is over its quota, a limit of 0 is none.
    """
    for line in text.splitlines():
        words = line.split()
        numbers = [word.rstrip("*") for word in words[1:9]]
        if len(numbers) < 7 or not all(number.isdecimal() for number in (*numbers[:3], *numbers[4:7])):
            continue
        used, soft, hard = (int(number) for number in numbers[:3])
        files, soft_files, hard_files = (int(number) for number in numbers[4:7])
        limit, most = hard or soft, hard_files or soft_files
        return Quota(
            command=command,
            free_bytes=(limit - used) * BLOCK if limit else None,
            free_files=most - files if most else None,
        )
    return None
