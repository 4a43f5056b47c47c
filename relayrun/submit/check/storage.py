"""Whether the checkpoints that a run keeps fit the file system, and the quota."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from relayrun.control.chain.quota import read_quotas
from relayrun.control.rundir import purge
from relayrun.control.rundir.lineage import Lineage
from relayrun.control.rundir.quota import QuotaLimit
from relayrun.control.rundir.run import Run
from relayrun.submit.check.findings import Findings
from relayrun.submit.check.place import existing_parent
from relayrun.submit.forecast import Forecast, format_bytes
from relayrun.tokens.shards.made_by import iterate_data_sets
from relayrun.tokens.shards.manifest import Manifest


def check_space(forecast: Forecast, run: Run, findings: Findings, *, quota_command: Sequence[str] = ()) -> None:
    """Compare what checkpoints take with what is free where the run directory lies.

    `quota_command`: the site's own that says the quota.
    """
    place = existing_parent(run.checkpoints)
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    already = 0
    for path in run.checkpoints.glob("iter_*/*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            already += path.stat().st_size
    one, kept = forecast.checkpoint.bytes, forecast.checkpoint.most_bytes
    name = "storage.space"
    words = f"{format_bytes(free)} free below {place}; a checkpoint has {format_bytes(one)}, all that are kept {format_bytes(kept)}"
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
    with findings.catching("storage.quota"):
        for limit in read_quotas(place, quota_command):
            _check_quota(limit, place, one, kept - already, findings)


def check_purges(purge_days: Mapping[str, float], run: Run, manifest: Manifest | None, findings: Findings) -> None:
    """Say what the site would remove of a run's newest checkpoint and of its data, and when; warn of the next week."""
    if not purge_days:
        return
    now = time.time()
    with findings.catching("storage.purge"):
        newest = Lineage(run).durable()
        every = [] if manifest is None else [shards for _, shards in iterate_data_sets(manifest, None)]
        paths = [f"{shard.prefix}.bin" for shards in every for shard in shards.shards]
        paths += [file.path for shards in every for file in shards.files if "://" not in file.path]
        found = [
            purge.checkpoint_purge(newest.iteration, newest.path, purge_days),
            purge.first_purge("training data", "data", paths, purge_days),
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


def _check_quota(limit: QuotaLimit, place: Path, one: int, kept: int, findings: Findings) -> None:
    name, free = "storage.quota", max(limit.limit - limit.used, 0)
    if limit.kind == "files":
        if free < 1000:
            findings.warn(name, f"{limit.source}: {free} files left", where=place)
        return
    words = f"{limit.source}: {format_bytes(free)} left"
    if free < one:
        findings.warn(name, f"{words}, and not one checkpoint fits", where=place, value=free, remedy="free some space")
    elif free < kept:
        findings.warn(name, f"{words}, and not all checkpoints that are kept fit", where=place, value=free)
    else:
        findings.ok(name, words, value=free)
