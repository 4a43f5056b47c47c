"""Code of the user that a config names by import path: all ranks import it, or all refuse it alike."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from relayrun.errors import ConfigError

if TYPE_CHECKING:
    from relayrun.train.distributed import Ranks

T = TypeVar("T")


def import_user_code(path: str) -> Any:
    """Return what `module:name` names. Raises ConfigError in words if it cannot be imported."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} cannot be imported: {describe_error(error)}") from error


def agree_on_user_code(make: Callable[[], T], ranks: Ranks, *, setting: str, hint: str) -> T:
    """Return what `make` does on this rank; called by all ranks together.

    Raises ConfigError, naming the setting, on all ranks alike if `make` raised one on one of them.
    """
    made, problem = None, None
    try:
        made = make()
    except ConfigError as error:
        problem = error.message
    for rank, text in enumerate(ranks.gather(problem)):
        if text is not None:
            raise ConfigError(text if rank == 0 else f"{text} (rank {rank})", where=setting, hint=hint)
    return made  # type: ignore[return-value]  # what raised nothing has made it


def describe_error(error: BaseException) -> str:
    """Type, message, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
