"""`command`: a program of the user's own. A submit validates it; every job reads it from plan.json."""

import re
from dataclasses import dataclass, field
from signal import Signals
from typing import Annotated, Literal

from relayrun.config.sections.dataclass_section import Checked, DataclassSection, OutputPath, Positive, SingleLine
from relayrun.files import leads_out

UNCATCHABLE_SIGNALS = ("SIGKILL", "SIGSTOP")
"""Signals that a program cannot catch."""


def _signal(name: str) -> str:
    if name not in Signals.__members__:
        raise ValueError(f"{name!r} is no signal; write one as SIGUSR1, SIGUSR2 or SIGTERM")
    if name in UNCATCHABLE_SIGNALS:
        raise ValueError(f"no program hears {name}; SIGUSR1, SIGUSR2 or SIGTERM can be heard")
    return name


def _progress(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise ValueError(f"this is no regular expression: {error}") from None
    if "iteration" not in groups:
        raise ValueError(r"it needs a group `iteration`, as in `step (?P<iteration>\d+) loss (?P<loss>\S+)`")
    return pattern


def _pattern(name: str) -> str:
    if name.count("{iteration}") != 1 or "{iteration}" not in name.rpartition("/")[2]:
        raise ValueError("it needs {iteration} once, in its last part, as in `checkpoint-{iteration}`")
    return _below(name)


def _below(path: str) -> str:
    if leads_out(path):
        raise ValueError("this is a path below the folder of checkpoints or the checkpoint, by its path from there")
    return path


def _entry(name: str) -> str:
    """Check the name of an entry directly in the run's folder of checkpoints."""
    if "/" in name or name in (".", ".."):
        raise ValueError("this is the name of an entry of the run's folder of checkpoints, without a /")
    return name


SignalName = Annotated[str, Checked(_signal)]


def _not_empty(words: list[str]) -> list[str]:
    if not words:
        raise ValueError("List should have at least 1 item")
    return words


@dataclass(frozen=True, kw_only=True)
class CommandCheckpointSection(DataclassSection):
    """Entries of the run's folder of checkpoints that count. Without `pattern` the program reports checkpoints through
    the client."""

    pattern: Annotated[SingleLine, Checked(_pattern)] | None = None
    """Name of a checkpoint, a file or a folder, with `{iteration}` for its number: `checkpoint-{iteration}`. `*` and
    other names in braces are any text, and folders may precede it: `version_*/epoch={epoch}-step={iteration}.ckpt`."""
    whole_when: Annotated[SingleLine, Checked(_below)] | None = None
    """A file in the checkpoint that is written last, or beside it with `{name}` or `{stem}` (its name without the last
    suffix): `{name}.done`. Without this and the next two settings, the name must appear last: write under another name,
    then rename."""
    unfinished_when: Annotated[SingleLine, Checked(_below)] | None = None
    """A file, named like `whole_when`, that exists while the checkpoint is incomplete: `{stem}-unfinished`."""
    tracker: Annotated[SingleLine, Checked(_entry)] | None = None
    """A file beside the checkpoints that names the newest complete one, by its iteration or its name, and is written
    after it."""
    folder: OutputPath | None = None
    """Folder of the checkpoints, to which `checkpoints` in the run's directory is then a link. None: that is a folder.
    A run without checkpoints of its own begins with the newest complete one that it finds there."""
    keep_last: Positive | None = None
    """Newest checkpoints that the chain keeps; it removes older ones. None: the program removes checkpoints itself, and
    the chain does not miss them."""

    def __post_init__(self) -> None:
        for name in ("whole_when", "unfinished_when", "tracker", "folder"):
            if getattr(self, name) is not None and self.pattern is None:
                raise ValueError(f"{name} needs `pattern`, which says what a checkpoint is called")
        if self.tracker is not None and "/" in (self.pattern or ""):
            raise ValueError("a tracker lies beside the checkpoints: leave it out, or the folders of `pattern`")


@dataclass(frozen=True, kw_only=True)
class CommandSection(DataclassSection):
    """The program that every rank executes, and how it is monitored and signalled (`relayrun help command`)."""

    run: Annotated[list[SingleLine], Checked(_not_empty)]
    """Program and arguments, word by word, without a shell. Placeholders: `{python}` (cluster.python, or the Python
    that submits), `{run_dir}`, `{checkpoints}` (the folder for them) and `{iteration}` (to resume from, or 0)."""
    resume: list[SingleLine] = field(default_factory=list)
    """Further arguments if there is a checkpoint to resume from; `{checkpoint}` is its path."""
    checkpoint: CommandCheckpointSection = field(default_factory=CommandCheckpointSection)
    progress: Annotated[str, Checked(_progress)] | None = None
    """Regular expression of a line that the program prints for an iteration, with a group `iteration`; the numbers of
    other groups are metrics. None: the program reports its iterations through the client."""
    progress_file: SingleLine | None = None
    """A file to which the program appends a line of JSON for an iteration, with `iteration`, `step` or `global_step`
    and other numbers, which are metrics; below the run's directory, or `{checkpoints}/...`."""
    save_signal: SignalName | None = None
    """Signal on which the program saves and continues; None: through the client or `save_file` alone."""
    save_file: OutputPath | None = None
    """A file, named like `progress_file`, whose existence asks for a checkpoint; the program removes it."""
    leave_signal: SignalName | None = "SIGUSR2"
    """Signal on which every rank saves and ends with exit code 0; None: through the client or `leave_file` alone."""
    leave_file: OutputPath | None = None
    """A file, named like `progress_file`, whose existence asks every rank to save and end with exit code 0."""
    steps: Positive | None = None
    """The last iteration. None: the run is done when the program ends with exit code 0 without a request to leave."""
    done: Literal["evidence", "exit-code"] = "evidence"
    """`evidence`: exit code 0 without a step, a checkpoint or a word of the client, or after an exception in the log,
    is a failure. `exit-code`: without `steps`, exit code 0 alone says that the run is done."""

    def __post_init__(self) -> None:
        if self.save_signal is not None and self.save_signal == self.leave_signal:
            raise ValueError(f"save_signal and leave_signal are both {self.save_signal}: it could not tell them apart")
