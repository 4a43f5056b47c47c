"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from relayrun.errors import InputError, RelayrunError
from relayrun.files import fsync_directory, remove_leftovers, rename_to_unused_name, temporary_prefix
from relayrun.train.export.target import refuse_existing


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target` to write into; at the end it is synced and gets its name.

    If the block fails nothing is left. Raises InputError if `target` exists or cannot be written.
    """
    target = target.absolute()
    refuse_existing(target)
    temporary = target.with_name(f"{temporary_prefix()}{secrets.token_hex(8)}")  # two containers may have one number
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent, shared=True)
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        refuse_existing(target)
        rename_to_unused_name(temporary, target)
        fsync_directory(target.parent)
    except RelayrunError:
        raise
    except (Exception, CheckpointException) as error:  # torch's writers say it in words of their own
        words = _why_not_written(error)
        if words is None:
            raise
        raise InputError(
            f"cannot be written: {words}", where=target, hint="see that there is room, and that you may write there"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _why_not_written(error: BaseException | None) -> str | None:
    """What stopped a write; None if this is another kind of error."""
    if error is None:
        return None
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, CheckpointException):
        return next((words for inner, _ in error.failures.values() if (words := _why_not_written(inner))), None)
    if isinstance(error, SafetensorError):
        return str(error)
    inner = _why_not_written(error.__cause__ or error.__context__)
    if inner is None and isinstance(error, RuntimeError) and "inline_container" in str(error):
        return "torch's writer met a full disk, a quota or a limit of file sizes"
    return inner


def _sync(folder: Path) -> None:
    """And give the files the mode that the umask asks for: safetensors makes its own 0600."""
    mode = folder.stat().st_mode & 0o666
    for directory, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                os.fchmod(fd, mode)
                os.fsync(fd)
            finally:
                os.close(fd)
        fsync_directory(directory)
