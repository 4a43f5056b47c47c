"""A process that is killed at one of its calls of functions that change files."""

from __future__ import annotations

import os
import signal
from typing import Any


class KillAtCall:
    """Counts the calls of functions; SIGKILL of this process at call number `call`, from 1."""

    def __init__(self, call: int) -> None:
        self._left = call

    def count(self, owner: Any, *names: str) -> None:
        """Count the calls of these functions of a module or class from now on."""
        for name in names:
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Any) -> Any:
        def counting(*given: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **options)

        return counting
