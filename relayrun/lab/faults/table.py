"""The table of faults: for each fault its action on a chain, and the required end of the chain.

`resumed`: the run finishes, and every loss and every tensor equals that of the undisturbed run. `stopped`: the chain
ends, states the reason in STOP, and leaves no job in the queue. Tests and `relayrun drill` read the same table,
`faults.yaml` beside this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from relayrun.config.compose import yaml_file
from relayrun.lab.faults import actions
from relayrun.lab.faults.target import ClusterUnderTest


class RequiredPrivilege(Enum):
    """Rights that a fault needs beyond a user's; the value explains why it is left out without them."""

    CONTROL = "it ends daemons of Slurm or changes slurm.conf: only on a test cluster"
    PARTITIONS = "it needs two partitions, of which one takes the nodes of the other: only on a test cluster"
    ROOT = "it needs root's rights, for a small file system or to stop slurmstepd: only on a test cluster, by root"


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    name: str
    what: str
    causes: Sequence[str]
    """Required causes of the attempts' ends, in order; see `AttemptEnd.cause`. `a|b`: either."""
    act: Callable[[ClusterUnderTest], None] = actions.do_nothing
    """Called when the first attempt has begun."""
    _: KW_ONLY
    before_begin: bool = False
    """Call `act` right after the submit: it keeps the first attempt from beginning."""
    inject: str = ""
    """Faults for `relayrun.lab.faults.injection.FaultInjectionHook`, in every rank."""
    config: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Changes of the run config, by section."""
    says: str = ""
    """Required text in STOP, or in the reasons of the attempts' ends."""
    logged: str = ""
    """Required text in the jobs' logs."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Bash by name of a scheduler's command or the supervisor's `python3`, run before it, inside jobs alone.

    `${real}` is the command; Bash that does harm creates the file `${provoked}`.
    """
    small_disk: str = ""
    """Folder of the run directory that becomes a small file system of its own; `.` is all of it."""
    needs: RequiredPrivilege | None = None
    """None: any user who may submit jobs can inject it."""
    long: bool = True
    """The test waits for Slurm's own timers."""

    @property
    def expect(self) -> Literal["resumed", "stopped"]:
        """The required end of the chain, which follows from the last cause."""
        return "resumed" if self.causes[-1] == "done" else "stopped"


TABLE = Path(__file__).with_name("faults.yaml")
UNDISTURBED = Fault("undisturbed", "nothing: what the others are compared with", ("done",))
"""The run without a fault."""


def read_faults(path: Path) -> tuple[Fault, ...]:
    """Return the faults of a table. Raises ConfigError, AttributeError for an unknown action."""
    return tuple(_fault(name, **values) for name, values in yaml_file.read_yaml(path).values.items())


def _fault(name: str, what: str, causes: Sequence[str], *, act: str = "", needs: str = "", **others: Any) -> Fault:
    action = getattr(actions, act or "do_nothing")
    return Fault(name, what, tuple(causes), action, needs=RequiredPrivilege[needs] if needs else None, **others)


FAULTS = read_faults(TABLE)
FAULTS_BY_NAME = {fault.name: fault for fault in FAULTS}
