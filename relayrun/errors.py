"""Every error that relayrun raises on purpose, and how a program says what went wrong.

    RelayrunError            a person can mend it; programs print it without a traceback, exit code 1
    ├── ConfigError          a setting is wrong: file, line, name
    ├── InputError           a file or folder that was given is missing, torn or of the wrong kind
    ├── RunDirError          the run directory is damaged, or refuses what was asked of it
    ├── SchedulerError       Slurm (or the local scheduler) refused or could not be reached
    └── FatalTrainingError   training cannot go on, and another attempt would fail in the same way

An error says what is wrong, where, and what to do: all of what is wrong at once (`combined_error`), the nearest name
where one is unknown (`did_you_mean`), and whose a place is that is closed (`describe_owner`). What goes wrong without
ending the program is a warning: modules give it to `logging.getLogger(__name__)`, and every program calls
`log_to_stderr` once.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import logging
import os
import pwd
import re
import shlex
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from relayrun.progress import clear_line
from relayrun.terminal import inert, inert_output


class RelayrunError(Exception):
    """An error with a message, `where` (file, line, name) and a `hint` what to do."""

    def __init__(self, message: str, *, where: object = None, hint: str | None = None) -> None:
        self.message = message
        self.where = None if where is None else str(where)
        self.hint = hint
        self.parts: list[RelayrunError] = []
        """The errors that this one combines, see `combined_error`."""
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


MAX_NAMED_ERRORS = 10
"""Number of errors of one kind that are named; the others are counted."""


def combined_error(errors: Sequence[RelayrunError], what: str | None = None) -> RelayrunError:
    """Return one error for all of them; a single error as it is. `what`, as in `shards are damaged`: they are of one
    kind, each is named, up to `MAX_NAMED_ERRORS`, and each hint appears once. None: they are of several kinds, and each
    appears in full."""
    if len(errors) == 1:
        return errors[0]
    if what is None:
        joined = RelayrunError("\nerror: ".join(map(str, errors)))
        joined.parts = list(errors)
        return joined
    lines = [str(RelayrunError(error.message, where=error.where)) for error in errors[:MAX_NAMED_ERRORS]]
    if len(errors) > MAX_NAMED_ERRORS:
        lines.append(f"and {len(errors) - MAX_NAMED_ERRORS:,} more")
    hints = dict.fromkeys(error.hint for error in errors if error.hint is not None)
    text = "\n  ".join([f"{len(errors):,} {what}:", *lines])
    joined = type(errors[0])(text, hint="; ".join(list(hints)[:2]) or None)
    joined.parts = list(errors)
    return joined


def split_combined_error(error: RelayrunError) -> list[RelayrunError]:
    """Return the errors that `combined_error` has combined, or the error alone."""
    return error.parts or [error]


def did_you_mean(word: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.6) -> str:
    """Return `did you mean 'a', 'b' or 'c'?` with the nearest of the `known` words; empty if none is near. `cutoff`:
    minimum similarity, from 0 (anything) to 1 (equal)."""
    return _question(_close_matches(word, known, most, cutoff))


def did_you_mean_path(path: str | os.PathLike[str]) -> str:
    """Return `did_you_mean` for a path of which a part is missing."""
    missing = Path(os.path.abspath(path))
    while not missing.parent.exists():
        missing = missing.parent
    try:
        names = sorted(os.listdir(missing.parent))
    except OSError:
        return ""
    return _question([str(missing.parent / name) for name in _close_matches(missing.name, names, 3, 0.6)])


def _close_matches(word: str, known: Iterable[str], most: int, cutoff: float) -> list[str]:
    from difflib import get_close_matches  # for errors alone

    return get_close_matches(word, list(dict.fromkeys(known)), n=most, cutoff=cutoff)


def _question(names: Sequence[str]) -> str:
    if not names:
        return ""
    quoted = [repr(name) for name in names]
    return f"did you mean {' or '.join(filter(None, [', '.join(quoted[:-1]), quoted[-1]]))}?"


def user_name(uid: int | None) -> str:
    """Return the user's name, or the number as text: containers often lack the site's user database."""
    if uid is None:
        return "an unknown user"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return the group's name, or the number as text."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


URL_WRITE_HINT = "write into a folder, and copy it from there"
"""Hint for an attempt to write to a URL."""


def why_url_is_refused(path: str | os.PathLike[str]) -> str | None:
    """Return why nothing is written to a place that is a URL; None if it is a path. pathlib makes s3:/bucket of
    s3://bucket, and a local folder of that name would be made."""
    text = os.fspath(path)
    if (found := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+", text)) is None:
        return None
    url = f"{found[1]}://{'/' if found[1] == 'file' else ''}{text[found.end() :]}"
    return f"{url} is a URL, and only folders of this machine are written to"


def refuse_urls(*paths: str | os.PathLike[str]) -> None:
    """Raise InputError if a place that is to be written to is a URL."""
    for path in paths:
        if (refusal := why_url_is_refused(path)) is not None:
            raise InputError(refusal, hint=URL_WRITE_HINT)


def refuse_unwritable(*paths: str | os.PathLike[str]) -> None:
    """Raise InputError if this user may not write a file or into a folder, or create it."""
    refuse_urls(*paths)
    for path in paths:
        place = nearest_existing(path)
        mode = os.W_OK | os.X_OK if place.is_dir() else os.W_OK
        if not os.access(place, mode, effective_ids=True):
            raise InputError(f"you may not write here: {describe_owner(path)}", where=path, hint=_how_to_write(place))


def describe_owner(path: str | os.PathLike[str], *, closed: Path | None = None) -> str:
    """Return owner, group and mode of a path, of its nearest existing folder, or of `closed`."""
    place = closed or nearest_existing(path)
    found = os.stat(place)
    which = "it" if place == Path(os.path.abspath(path)) else str(place)
    owner, group = user_name(found.st_uid), group_name(found.st_gid)
    return f"{which} belongs to {owner}, group {group}, mode {stat.filemode(found.st_mode)}"


def nearest_existing(path: str | os.PathLike[str]) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    place = Path(os.path.abspath(path))
    while not os.path.lexists(place):
        place = place.parent
    return place


def _how_to_write(place: Path) -> str:
    """Return a hint for a person who may not write at `place`."""
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return "its file system is mounted read-only here; choose another place"
    name = user_name(os.stat(place).st_uid)
    return f"choose a place of your own, or let {name} open it (chmod g+w)"


EXTRAS = {
    module: extra
    for extra, modules in {
        "train": "torch megatron safetensors wandb tensorboard",
        "tokenize": "datatrove fsspec orjson zstandard pyarrow submitit transformers psutil matplotlib",
        "evaluate": "lm_eval",
        "fast": "gigatoken awkward",
        "bench": "duckdb",
        "metrics": "prometheus_client",
    }.items()
    for module in modules.split()
}
"""Modules that the base installation lacks, and the extra of relayrun that brings each."""


def missing_extra(error: ModuleNotFoundError) -> RelayrunError | None:
    """Return an error that names the extra of a missing module; None for any other module."""
    name = (error.name or "").partition(".")[0]
    if name not in EXTRAS:
        return None
    return RelayrunError(
        f"this needs {name}, which is not installed in {sys.prefix}", hint=f"pip install 'relayrun[{EXTRAS[name]}]'"
    )


class _StderrLines(logging.Handler):
    """Writes `warning: text`, for every level above INFO, and plain `text` for INFO, to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        try:
            clear_line()
            print(inert(f"{level}{self.format(record)}"), file=sys.stderr, flush=True)  # the stream that it is by now
        except Exception:
            self.handleError(record)


def log_to_stderr() -> None:
    """Send the log of relayrun's modules and of the program itself, from INFO on, to standard error. The loggers of
    other libraries stay as they are. A second call changes nothing."""
    for name in ("relayrun", "__main__"):  # a module that runs as a program has the second name
        log = logging.getLogger(name)
        if not any(isinstance(handler, _StderrLines) for handler in log.handlers):
            log.addHandler(_StderrLines())
        log.setLevel(logging.INFO)


@contextlib.contextmanager
def warned(log: logging.Logger, words: str, *arguments: object) -> Iterator[None]:
    """Log an OSError of the block as a warning, behind these words: the program goes on without what was to be done."""
    try:
        yield
    except OSError as error:
        log.warning(f"{words}: %s", *arguments, error)


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a command to end: Ctrl-C, `scancel` and `timeout`, a closed terminal."""
_kept: list[str] = []
"""Sentences of `on_interrupt` about the work that was given up, innermost first."""
_began: list[bool] = []
"""Not empty: the command may have changed something."""


class Interrupted(KeyboardInterrupt):
    """One of `ENDING_SIGNALS` came: its argument is the name."""


@contextlib.contextmanager
def on_interrupt(words: Callable[[], str]) -> Iterator[None]:
    """If a signal ends the command inside the block, it says in these words what is kept, and how to go on."""
    begin_changes()
    try:
        yield
    except BaseException:  # libraries turn an interrupt into errors of their own
        _kept.append(words())
        raise


def begin_changes() -> None:
    """From now on the command may change something: if a signal ends it, it does not say that nothing was changed."""
    _began.append(True)


def command_name() -> str:
    """Return the program and its subcommands, as far as these are the first two arguments."""
    program = Path(sys.argv[0]).name
    words = ("relayrun" if program == "__main__.py" else program, *(w for w in sys.argv[1:3] if not w.startswith("-")))
    return shlex.join(words)


@contextlib.contextmanager
def _ending_signals() -> Iterator[list[int]]:
    """Raise Interrupted at the first of `ENDING_SIGNALS` that is not ignored; yield the list that it will be in."""
    came: list[int] = []
    owner, former = os.getpid(), {}

    def end(number: int, _frame: object) -> None:
        if os.getpid() != owner or (came and number == signal.SIGINT):  # a fork; a person who does not want to wait
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not came:
            came.append(number)
            _kept.clear()  # of errors that the command has survived
            raise Interrupted(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        usual = (signal.SIG_DFL, signal.default_int_handler)
        former = {each: signal.signal(each, end) for each in ENDING_SIGNALS if signal.getsignal(each) in usual}
    try:
        yield came
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def run_command(main: Callable[[], int | None]) -> int:
    """Run a command of a person as `run_main` does. Any of `ENDING_SIGNALS` ends it as Ctrl-C does: temporary files
    are removed, one line says what is kept or that nothing was changed, and the exit code is 128 and the signal's
    number."""
    _began.clear()
    with _ending_signals() as came:
        try:
            return run_main(main, interrupted=lambda: bool(came))
        except BaseException:
            if not came:
                raise
        name = "" if came[0] == signal.SIGINT else f" by {signal.Signals(came[0]).name}"
        with contextlib.suppress(OSError, ValueError):  # the words of the end are the last ones
            sys.stdout.flush()
        words = _kept[:1] or [f"`{command_name()}`" + ("" if _began else " has changed nothing")]
        print(f"interrupted{name}: {words[0]}", file=sys.stderr)
        return 128 + came[0]


def run_main(main: Callable[[], int | None], *, interrupted: Callable[[], bool] = lambda: False) -> int:
    """Run a program's `main` with inert output; return its exit code. Warnings go to standard error. A RelayrunError, a
    missing module of an extra, or an OSError that names a file (read-only, full disk, missing) becomes one message on
    standard error and exit code 1. Anything else is a defect of relayrun and keeps its traceback. `interrupted`: every
    error is raised if it returns True."""
    log_to_stderr()
    with inert_output():
        try:
            return main() or 0
        except BaseException as error:
            if interrupted() or (code := _report(error)) is None:
                raise
            return code


def _report(error: BaseException) -> int | None:
    """Print what ended a program; return its exit code, or None for a defect."""
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    if isinstance(error, BrokenPipeError):  # `relayrun ... | head`: the reader left, which is no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    told: BaseException | None = error if isinstance(error, RelayrunError) else None
    if isinstance(error, ModuleNotFoundError):
        told = missing_extra(error)
    elif isinstance(error, OSError) and (error.filename is not None or error.strerror is not None):
        told = _explain_os_error(error)
    if told is None:
        return None
    print(f"error: {told}", file=sys.stderr)
    return 1


def _explain_os_error(error: OSError) -> RelayrunError:
    """Return the system's error, with the owner of the place if it is closed to this user."""
    text = error.strerror or str(error)
    if error.filename is None:
        return RelayrunError(text)
    # a new name is at fault, unless the old one is missing
    named = error.filename if error.filename2 is None or error.errno == errno.ENOENT else error.filename2
    path = os.fsdecode(named) if isinstance(named, (str, bytes)) else str(named)
    path = re.sub(r"/\.tmp-.*", "", path, flags=re.S)  # a temporary name tells nothing
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return RelayrunError(text, where=path)
    try:
        closed = _inaccessible_part(path)
        return RelayrunError(f"{text}: {describe_owner(path, closed=closed)}", where=path, hint=_how_to_write(closed))
    except OSError:
        return RelayrunError(text, where=path)


def _inaccessible_part(path: str) -> Path:
    """Return the folder of a path that this user may not pass, or the nearest part that exists."""
    for folder in reversed(Path(os.path.abspath(path)).parents):
        if folder.is_dir() and not os.access(folder, os.X_OK, effective_ids=True):
            return folder
    return nearest_existing(path)
