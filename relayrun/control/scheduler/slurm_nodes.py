"""The nodes of a Slurm cluster: their names, whether enough are up, and the nodes that a queued job may use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from relayrun.control.rundir.plan import Plan
from relayrun.control.scheduler import slurm_commands
from relayrun.control.scheduler.base import MinimumNodes
from relayrun.control.scheduler.slurm_commands import NoAnswerError
from relayrun.errors import SchedulerError

_NO_NODES = re.compile("node configuration is not available|[Nn]odes? not available|Invalid node name")
"""Messages of sbatch if too few nodes are up and not excluded, if a node that the job requests by name is excluded, and
if a named node does not exist."""

NODES_TEST_SECONDS = 20.0
"""Time limit of sbatch, retries included, for `suffice`: ranks or the order to queue a job wait. No other question
costs the controller more."""


class NodeCommands(Protocol):
    """The commands of `relayrun.control.scheduler.slurm.Slurm` that node control uses."""

    def ask(self, command: Sequence[str], *, answer: str = "") -> str:
        """Run a command that changes nothing and return its output."""

    def order(self, command: Sequence[str], lines: Sequence[str] = ()) -> str:
        """Run a command that changes something, and may safely run twice; return its output."""

    def test(self, script: Path, options: Mapping[str, str] | None = None) -> str:
        """Ask Slurm whether it would accept the script with these options of sbatch; nothing is queued."""


class SlurmNodes:
    """The nodes of a Slurm cluster."""

    def __init__(self, slurm: NodeCommands, hasty: NodeCommands) -> None:
        self._slurm, self._hasty = slurm, hasty

    def expand(self, nodes: str) -> list[str]:
        return self._slurm.ask(["scontrol", "show", "hostnames", nodes]).split()

    def known(self) -> set[str]:
        return set(self._slurm.ask(["sinfo", "--noheader", "--Node", "--format=%N"]).split())

    def suffice(self, plan: Plan, script: Path, options: Mapping[str, str]) -> bool:
        try:
            self._hasty.test(script, slurm_commands.gpu_options_like_script(options, plan.sbatch_options))
        except SchedulerError as error:  # other refusals do not concern nodes
            if isinstance(error, NoAnswerError):
                raise
            return not says_too_few_nodes(error)
        return True

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        self._slurm.order(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}"])

    def do_with(self, job_id: str, few: MinimumNodes) -> None:
        self._slurm.order(["scontrol", "update", f"JobId={job_id}", *fewer_nodes_changes(few)])


def says_too_few_nodes(error: SchedulerError) -> bool:
    """True if sbatch refused a job because too few nodes may be used."""
    return _NO_NODES.search(error.message) is not None


def fewer_nodes_changes(few: MinimumNodes | None) -> list[str]:
    """Return the changes that let a job start with fewer nodes; without NumTasks Slurm would keep the tasks of all
    nodes.
    """
    return [] if few is None else [f"NumNodes={few.nodes}-{few.of}", f"NumTasks={few.tasks}"]
