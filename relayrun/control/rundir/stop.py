"""STOP: the file whose existence ends a chain. Standard library only."""

from __future__ import annotations

from relayrun.control.rundir.run import STOP_NAME, Run
from relayrun.files import path_exists, read_bytes, write_atomic


def stop_reason(run: Run) -> str | None:
    """Why the chain ended; None where it has not. Read anew each time: anybody may stop a chain, and lift that."""
    try:
        return read_bytes(f"{run.path}/{STOP_NAME}").decode().partition("\n")[0].rstrip("\r")
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        return "STOP is there, as a directory"


def is_stopped(run: Run) -> bool:
    """Whether the chain has ended. Raises OSError where the run directory may not be looked into."""
    return path_exists(f"{run.path}/{STOP_NAME}")


def write_stop(run: Run, reason: str, *, words: str = "") -> None:
    """End the chain, unless it has ended already: the first reason stays. `words`: the last ones of its log."""
    if stop_reason(run) is None:
        text = f"{reason.replace(chr(10), ' ')}\n\nThe chain has ended. To go on all the same: submit with --resume.\n"
        write_atomic(run.stop, text + (f"\nThe last lines of its log:\n{words}\n" if words else ""))
