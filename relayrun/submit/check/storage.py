"""Check the paths that the jobs of a run write: permissions, space and quotas."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from relayrun.config.compose.schema import CommonConfig, MegatronConfig, RunConfig
from relayrun.config.compose.writable import read_only_path_of
from relayrun.control.chain.quota import read_quotas
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.storage_limits import QuotaLimit, format_bytes
from relayrun.errors import URL_WRITE_HINT, InputError, nearest_existing, why_url_is_refused
from relayrun.files import file_size, free_space, write_error
from relayrun.submit import policies
from relayrun.submit.check.findings import Findings
from relayrun.submit.forecast import Forecast
from relayrun.submit.policies import mirror_settings

PATH_VARIABLES = (
    "HF_HOME",
    "TMPDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TRITON_CACHE_DIR",
    "WANDB_CACHE_DIR",
    "WANDB_DIR",
    "XDG_CACHE_HOME",
)
"""Variables that name a folder into which libraries of the ranks write."""


def check_written_paths(config: CommonConfig, run: Run, log_folder: Path, findings: Findings) -> None:
    """Look at every path that a job of the run writes, links followed, and at the folder of the logs."""
    read_only = config.cluster.read_only_paths
    count = 0
    for setting, path in written_paths(config, run, log_folder):
        count += 1
        if (refusal := why_url_is_refused(path)) is not None:
            findings.refuse("place.url", refusal, setting=setting, remedy=URL_WRITE_HINT)
        for place in read_only:
            if read_only_path_of(path, [place]) is not None:
                what = setting or ("run_dir" if path.is_relative_to(run.path) else "")
                words = f"cluster {config.cluster.name!r} allows no writing below {place}, and "
                words += (what or "the folder of the jobs' logs") + f" is {path}"
                remedy = f"set {what} to another file system" if what else "use a checkout on another file system"
                where = None if setting else path
                findings.refuse("place.read_only", words, where=where, setting=setting, value=str(path), remedy=remedy)
    if read_only and not any(finding.name == "place.read_only" for finding in findings.all):
        findings.ok("place.read_only", f"none of {count} paths that jobs write lies below {', '.join(read_only)}")
    if (second := mirror_settings(config)) is not None:
        words = f"copies of checkpoints: {policies.mirror_location(config, second)}"
        with findings.catching("place.mirror", ok=words):
            policies.refuse_mirror_location(second, run)
        folder, own = Path(second.path), nearest_existing(run.path)
        if folder.is_dir() and folder.stat().st_dev == own.stat().st_dev:
            words = "copies of checkpoints lie on the file system of the run, and are lost with it"
            remedy = "set checkpoint.mirror.path to a folder of another file system"
            findings.warn("place.mirror_apart", words, setting="checkpoint.mirror.path", remedy=remedy)
    with findings.catching("place.logs", ok=f"the folder of the jobs' logs, {log_folder}, can be written"):
        check_log_folder(log_folder)


def written_paths(config: CommonConfig, run: Run, log_folder: Path) -> Iterator[tuple[str | None, Path]]:
    """Every path that a job of the run writes, and the setting that names it.

    Paths in the run directory are named if they are links to other places.
    """
    yield "run_dir", run.path
    inside = [run.attempts, run.checkpoints, run.code, run.config, run.debug, run.evaluations]
    inside += [run.tensorboard, run.triggers, run.path / "wandb"]
    yield from ((None, path) for path in inside if path.is_symlink())
    if (second := mirror_settings(config)) is not None:
        yield "checkpoint.mirror.path", Path(second.path)
    data = config.data if isinstance(config, RunConfig | MegatronConfig) else None
    if data is not None and data.data_cache_dir is not None:
        yield "data.data_cache_dir", Path(data.data_cache_dir)
    yield None, log_folder
    for name in PATH_VARIABLES:
        if (folder := config.cluster.environment.get(name, "")).startswith("/") or why_url_is_refused(folder):
            yield f"cluster.environment.{name}", Path(folder)


def check_log_folder(folder: Path) -> None:
    """Raise InputError if this user cannot make the folder of the jobs' logs, or write in it.

    Jobs would die without a word. Nothing is made here.
    """
    if error := write_error(nearest_existing(folder.resolve())):
        words = f"the folder of the jobs' logs cannot be written: {error.strerror}, so every job would end at once"
        hint = "let its owner open it (chmod g+w), or use a checkout of your own"
        raise InputError(words, where=folder, hint=hint)


def check_space(forecast: Forecast, run: Run, findings: Findings, *, quota_command: Sequence[str] = ()) -> None:
    """Compare the size of checkpoints with the free space of the run directory.

    `quota_command`: the site's own that says the quota.
    """
    place = nearest_existing(run.checkpoints.resolve())
    status, free = os.statvfs(place), free_space(place)
    already = sum(file_size(path) for path in run.checkpoints.glob("iter_*/*"))
    one, kept = forecast.checkpoint.bytes, forecast.checkpoint.most_bytes
    name = "storage.space"
    words = f"{format_bytes(free)} free below {place}; "
    words += f"a checkpoint has {format_bytes(one)}, all that are kept {format_bytes(kept)}"
    if free + already < one:
        remedy = "free some space, or set run_dir to another file system"
        findings.refuse(name, f"{words}: not one fits", where=place, value=free, remedy=remedy)
    elif free + already < kept:
        remedy = "free some space, set run_dir to another file system, or lower checkpoint.keep_last"
        findings.warn(name, words, where=place, value=free, remedy=remedy)
    else:
        findings.ok(name, words, value=free)
    if status.f_files and not status.f_favail:
        findings.refuse("storage.files", f"no file more can be made below {place}", where=place, value=0)
    with findings.catching("storage.quota"):
        for limit in read_quotas(place, quota_command):
            _check_quota(limit, place, one, kept - already, findings)


def _check_quota(limit: QuotaLimit, place: Path, one: int, kept: int, findings: Findings) -> None:
    name, free = "storage.quota", max(limit.limit - limit.used, 0)
    if limit.kind == "files":
        if free < 1000:
            findings.warn(name, f"{limit.source}: {free} files left", where=place)
        return
    words = f"{limit.source}: {format_bytes(free)} left"
    if free < max(one, kept):
        few = "one checkpoint fits" if free < one else "all checkpoints that are kept fit"
        findings.warn(name, f"{words}, and not {few}", where=place, value=free, remedy="free some space")
    else:
        findings.ok(name, words, value=free)
