"""What became of a row of a drill: a JSON file each, so that a drill that was stopped goes on behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

from relayrun.control.rundir.records import Record


@dataclass(frozen=True, kw_only=True)
class FaultResult(Record):
    """One row that was done."""

    name: str
    what: str
    expect: str
    passed: bool
    wrong: list[str] = field(default_factory=list)
    """Why not, a sentence each."""
    seen: list[str] = field(default_factory=list)
    """How the attempts ended, in order."""
    said: str = ""
    """In words: the ends, and STOP."""
    stop: str = ""
    """Why the chain stopped; empty where it trained to the end."""
    seconds_lost: float = 0.0
    """Seconds of one node without new steps: lost work, hangs, later starts, and the waits before them."""
    steps_lost: int = 0
    """Steps that were computed again, or lost."""
    bit_for_bit: bool | None = None
    """Whether losses and checkpoint are those of the undisturbed run; None where the chain was to stop."""
    node_seconds: float = 0.0
    begin: float = 0.0
    """Seconds since 1970."""
    seconds: float = 0.0
    """From the submit to the end of the chain."""
    run_dir: str = ""
    job_ids: list[str] = field(default_factory=list)
