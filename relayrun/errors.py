"""Every error that relayrun raises on purpose, and how a program says what went wrong.

    RelayrunError            a person can mend it; programs print it without a traceback, exit code 1
    ├── ConfigError          a setting is wrong: file, line, name
    ├── InputError           a file or folder that was given is missing, torn or of the wrong kind
    ├── RunDirError          the run directory is damaged, or refuses what was asked of it
    ├── SchedulerError       Slurm (or the local scheduler) refused or could not be reached
    ├── FatalTrainingError   training cannot go on, and another attempt would fail in the same way
    └── SeveralErrors        all that one look found, each an error of its own

An error says what is wrong, where, and what to do. What goes wrong without ending the program is a warning: modules
give it to `logging.getLogger(__name__)`, and every program calls `log_to_stderr` once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence


class RelayrunError(Exception):
    """What is wrong (`message`), `where` (file, line, name) and what to do (`hint`)."""

    def __init__(self, message: str, *, where: object = None, hint: str | None = None) -> None:
        self.message = message
        self.where = None if where is None else str(where)
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        text = self.message if self.where is None else f"{self.where}: {self.message}"
        return text if self.hint is None else f"{text}\n  -> {self.hint}"


class ConfigError(RelayrunError):
    """A setting is wrong."""


class InputError(RelayrunError):
    """A file or folder that was given is missing, torn or of the wrong kind."""


class RunDirError(RelayrunError):
    """The run directory is damaged, or refuses what was asked of it."""


class SchedulerError(RelayrunError):
    """Slurm (or the local scheduler) refused, or could not be reached."""


class FatalTrainingError(RelayrunError):
    """Training cannot go on, and another attempt would fail in the same way."""


class SeveralErrors(RelayrunError):
    """All that one look found, each an error of its own."""

    def __init__(self, errors: Sequence[RelayrunError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\nerror: ".join(map(str, errors)))


class _StderrLines(logging.Handler):
    """Writes `warning: text`, for every level above INFO, and plain `text` for INFO, to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        try:
            print(f"{level}{self.format(record)}", file=sys.stderr, flush=True)  # the stream that it is by now
        except Exception:
            self.handleError(record)


def log_to_stderr() -> None:
    """Send what relayrun's modules and the program itself log, from INFO on, to standard error.

    The loggers of other libraries stay as they are. A second call changes nothing.
    """
    for name in ("relayrun", "__main__"):  # a module that runs as a program has the second name
        log = logging.getLogger(name)
        if not any(isinstance(handler, _StderrLines) for handler in log.handlers):
            log.addHandler(_StderrLines())
        log.setLevel(logging.INFO)


def run_main(main: Callable[[], int | None]) -> int:
    """Run a program's `main`; return its exit code.

    Warnings go to standard error. A RelayrunError or an OSError that names a file (read-only, full disk, missing)
    becomes one message on standard error and exit code 1. Anything else is a defect of relayrun and keeps its
    traceback.
    """
    log_to_stderr()
    try:
        return main() or 0
    except RelayrunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `relayrun ... | head`: the reader left, which is no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None and error.strerror is None:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"error: {where}{error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
