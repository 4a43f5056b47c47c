"""Import of a user's code that a config names: hooks, loss, model, optimizer. All ranks import it, or all refuse it."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from relayrun.errors import ConfigError

if TYPE_CHECKING:
    from relayrun.train.distributed import Ranks

T = TypeVar("T")


def import_user_object(path: str) -> Any:
    """Return the object at `module:name`. Raises ConfigError if it cannot be imported."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} cannot be imported: {describe_error(error)}") from error


def answer_request(answer: Callable[[Any], object]) -> None:
    """Answer one request, JSON on standard input, in JSON; what a user's modules print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps(answer(json.load(sys.stdin))), file=answers, flush=True)


def agree_on_user_code(make: Callable[[], T], ranks: Ranks, *, setting: str, hint: str) -> T:
    """Return the result of `make` on this rank; all ranks call it together.

    If `make` raises ConfigError on any rank, ConfigError is raised on all ranks and names the setting.
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
    """Return type, message, and the line that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
