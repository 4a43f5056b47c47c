"""A row of the drill's table: what is done to a training chain, and how it must end.

`resumed`: the run finishes, and every loss and every tensor is that of the undisturbed run.
`stopped`: the chain ends, says why in STOP, and leaves nothing queued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from relayrun.lab.faults import actions
from relayrun.lab.faults.stage import FaultTarget


class FaultRequirement(Enum):
    """What a fault takes that nobody has on a cluster of others; its value says why the row is left out there."""

    CONTROL = "it ends daemons of Slurm or changes slurm.conf: only on a test cluster"
    PARTITIONS = "it needs two partitions, of which one takes the nodes of the other: only on a test cluster"
    ROOT = "it needs root's rights, for a small file system or to stop slurmstepd: only on a test cluster, by root"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the table."""

    name: str
    what: str
    expect: Literal["resumed", "stopped"]
    causes: Sequence[str]
    """How the attempts must end, in order; see `End.cause`. `a|b`: either."""
    act: Callable[[FaultTarget], None] = actions.do_nothing
    """Is called when the first attempt has begun."""
    before_begin: bool = False
    """`act` is called as soon as the run is submitted: what it does keeps the first attempt from beginning."""
    inject: str = ""
    """For `relayrun.lab.faults.injection.FaultInjection`, in every rank."""
    config: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Changes of the run config, by section."""
    says: str = ""
    """Must stand in STOP, or in the reasons of the attempts' ends."""
    logged: str = ""
    """Must stand in the jobs' logs."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Bash that runs before a command of the scheduler, or before the `python3` of the supervisor, inside jobs alone.
    Each by the command's name. `${real}` is the command; who does harm makes the file `${provoked}`."""
    small_disk: str = ""
    """The folder of the run directory that is a small file system of its own; `.` is all of it."""
    needs: FaultRequirement | None = None
    """None: whoever may queue jobs can do it."""
    long: bool = False
    """It waits for Slurm's own clocks."""
