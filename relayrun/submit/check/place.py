"""Where the jobs of a run write, and whether they may."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from relayrun.config.compose.schema import CommonConfig, MegatronConfig, RunConfig
from relayrun.config.compose.writable import read_only_path_of
from relayrun.control.rundir.run import Run
from relayrun.errors import URL_WRITE_HINT, InputError, why_url_is_refused
from relayrun.submit import mirror_policy
from relayrun.submit.check.findings import Findings
from relayrun.submit.mirror_policy import mirror_settings

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
                what = setting or ("run_dir" if path.is_relative_to(run.path) else "the folder of the jobs' logs")
                findings.refuse(
                    "place.read_only",
                    f"cluster {config.cluster.name!r} allows no writing below {place}, and {what} is {path}",
                    where=path if setting is None else None,
                    setting=setting,
                    value=str(path),
                    remedy=f"set {setting or 'run_dir'} to another file system"
                    if setting or path.is_relative_to(run.path)
                    else "use a checkout on another file system",
                )
    if read_only and not any(finding.name == "place.read_only" for finding in findings.all):
        findings.ok("place.read_only", f"none of {count} paths that jobs write lies below {', '.join(read_only)}")
    if (second := mirror_settings(config)) is not None:
        words = f"copies of checkpoints: {mirror_policy.mirror_location(config, second)}"
        with findings.catching("place.mirror", ok=words):
            mirror_policy.refuse_mirror_location(second, run)
        folder = mirror_policy.mirror_folder(second)
        if (
            folder is not None
            and folder.is_dir()
            and os.stat(folder).st_dev == os.stat(existing_parent(run.path)).st_dev
        ):
            findings.warn(
                "place.mirror_apart",
                "copies of checkpoints lie on the file system of the run, and are lost with it",
                setting="checkpoint.mirror.path",
                value=second.path,
                remedy="set checkpoint.mirror.path to a folder of another file system",
            )
    with findings.catching("place.logs", ok=f"the folder of the jobs' logs, {log_folder}, can be written"):
        check_log_folder(log_folder)


def written_paths(config: CommonConfig, run: Run, log_folder: Path) -> Iterator[tuple[str | None, Path]]:
    """Every path that a job of the run writes, and the setting that names it.

    What lies in the run directory is named where it is a link to another place.
    """
    yield "run_dir", run.path
    inside = (
        run.attempts,
        run.checkpoints,
        run.code,
        run.config,
        run.debug,
        run.evaluations,
        run.tensorboard,
        run.triggers,
        run.path / "wandb",
    )
    yield from ((None, path) for path in inside if path.is_symlink())
    second = mirror_settings(config)
    if second is not None and (place := mirror_policy.mirror_folder(second)) is not None:
        yield "checkpoint.mirror.path", place
    data = config.data if isinstance(config, RunConfig | MegatronConfig) else None
    if data is not None and data.data_cache_dir is not None:
        yield "data.data_cache_dir", Path(data.data_cache_dir)
    yield None, log_folder
    for name in PATH_VARIABLES:
        if (folder := config.cluster.environment.get(name, "")).startswith("/") or why_url_is_refused(folder):
            yield f"cluster.environment.{name}", Path(folder)


def check_log_folder(folder: Path) -> None:
    """Raise InputError where this user cannot make the folder of the jobs' logs, or write in it.

    Jobs would die without a word. Nothing is made here.
    """
    there = existing_parent(folder)
    try:
        with tempfile.TemporaryFile(dir=there):  # asks the file system: root and NFS judge otherwise than the mode
            pass
    except OSError as error:
        raise InputError(
            f"the folder of the jobs' logs cannot be written: {error.strerror}, so every job would end at once",
            where=folder,
            hint="let its owner open it (chmod g+w), or use a checkout of your own",
        ) from None


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))
