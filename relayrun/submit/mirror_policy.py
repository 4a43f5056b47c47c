"""Where a run's checkpoints are copied to: from its config to the record that the supervisor reads."""

from __future__ import annotations

import secrets
import sys
import tempfile
from pathlib import Path

from relayrun.config.compose.schema import CommonConfig, MegatronConfig, RunConfig
from relayrun.config.sections.checkpoint import MirrorSection
from relayrun.control.rundir import mirror
from relayrun.control.rundir.mirror import MirrorOwner, MirrorPolicy
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError
from relayrun.files import write_atomic
from relayrun.train.mirror import object_store, sync
from relayrun.train.mirror.choose import destination_at
from relayrun.train.mirror.pace import CopyRateLimit


def mirror_settings(config: CommonConfig) -> MirrorSection | None:
    """Return what the config says of a second place; None where it has none."""
    checkpoint = config.checkpoint if isinstance(config, RunConfig | MegatronConfig) else None
    return None if checkpoint is None else checkpoint.mirror


def mirror_location(config: CommonConfig, settings: MirrorSection) -> str:
    """Return the folder of the run's copies, or its URL."""
    return f"{settings.path.rstrip('/')}/{config.project}/{config.name}"


def mirror_folder(settings: MirrorSection) -> Path | None:
    """Return the folder below which copies lie; None where that is a URL."""
    return None if "://" in settings.path else Path(settings.path)


def refuse_mirror_of_other_run(config: CommonConfig, run: Run, *, take_over: bool) -> None:
    """Raise ConfigError where another run's copies lie in the second place: nothing would be copied.

    `take_over`: those of a run whose directory is lost become this run's; see `prepare`.
    """
    owner = _other_mirrored_run(config, run)
    if owner is None:
        return
    settings = mirror_settings(config)
    assert settings is not None
    place = mirror_location(config, settings)
    where = f"checkpoint.mirror.path: {place}"
    if _is_copied(owner, run):
        hint = "set checkpoint.mirror.path to another place"
        raise ConfigError(f"it holds the copies of another run, {owner.run}", where=where, hint=hint)
    if not take_over:
        raise ConfigError(
            f"it holds the copies of a run that is not there any more, {owner.run}; nothing would be copied",
            where=where,
            hint="submit with --take-over to go on with them, or set checkpoint.mirror.path to another place",
        )
    checkpoint = config.checkpoint if isinstance(config, RunConfig | MegatronConfig) else None
    begins_anew = checkpoint is not None and checkpoint.load is None and run.newest_begun() is None
    if begins_anew and destination_at(place, CopyRateLimit(None)).copies():
        raise ConfigError(
            f"the run would begin anew, and its checkpoints take the place of the copies of {owner.run}",
            where=where,
            hint=f"`relayrun checkpoint restore {place} --to FOLDER`, then submit with --load "
            "FOLDER/iter_... --take-over; or set checkpoint.mirror.path to another place",
        )


def _other_mirrored_run(config: CommonConfig, run: Run) -> MirrorOwner | None:
    """The run whose copies lie in the second place, where it is another one. Raises RelayrunError, OSError."""
    settings = mirror_settings(config)
    owner = None if settings is None else destination_at(mirror_location(config, settings), CopyRateLimit(None)).owner()
    path = mirror.mirror_folder(run) / "id"
    if owner is None or (path.exists() and path.read_text(encoding="ascii") == owner.id and not _is_copied(owner, run)):
        return None
    return owner


def _is_copied(owner: MirrorOwner, run: Run) -> bool:
    """Whether the run is a copy of another directory that is still there and copies under the same id."""
    return owner.run != str(run.path) and sync.is_still_mirrored(Run(Path(owner.run)), owner.id)


def write_mirror_policy(config: CommonConfig, run: Run, *, take_over: bool = False) -> None:
    """Write the policy; none where the config has no second place. The copies that there are stay.

    `take_over`: the run is known by the id of the lost run whose copies lie there, so that they count as its own.
    """
    settings = mirror_settings(config)
    if settings is None:
        mirror.mirror_policy_path(run).unlink(missing_ok=True)
        return
    mirror.mirror_folder(run).mkdir(exist_ok=True)
    if take_over and (owner := _other_mirrored_run(config, run)) is not None:
        write_atomic(mirror.mirror_folder(run) / "id", owner.id)
    MirrorPolicy(
        folder=mirror_location(config, settings),
        id=_mirror_id(run),
        keep_last=settings.keep_last,
        keep_every=settings.keep_every,
        megabytes_per_second=settings.megabytes_per_second,
        program=[config.cluster.python or sys.executable, "-m", "relayrun.train.mirror"],
    ).write(mirror.mirror_policy_path(run))


def _mirror_id(run: Run) -> str:
    """The name under which the copies of this run are known; it stays."""
    path = mirror.mirror_folder(run) / "id"
    if not path.exists():
        write_atomic(path, secrets.token_hex(8))
    return path.read_text(encoding="ascii")


def refuse_mirror_location(settings: MirrorSection, run: Run) -> None:
    """Raise ConfigError where copies cannot lie in this place."""
    path = mirror_folder(settings)
    if path is None:
        object_store.check_object_store(settings.path, "checkpoint.mirror.path")
        return
    where = f"checkpoint.mirror.path: {path}"
    if not path.is_dir():
        raise ConfigError("there is no such folder", where=where, hint="make it, or mount it")
    if path.resolve().is_relative_to(run.path.resolve()):
        raise ConfigError("it lies in the run directory, and is lost with it", where=where)
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"it cannot be written: {error.strerror}", where=where) from None
