"""The nodes of a Slurm cluster: which there are, whether enough are up, and which of them a queued job may have."""

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
"""What sbatch says where nodes that are up, and not excluded, are too few; where one that the job asks for by its name
is excluded; and of one that the cluster does not have."""

NODES_TEST_SECONDS = 20.0
"""How long sbatch may take, all tries together, to say whether nodes suffice: ranks or the order to queue a job wait.
It costs a controller more than any other question."""


class NodeCommands(Protocol):
    """Slurm's commands: `relayrun.control.scheduler.slurm.Slurm`."""

    def ask(self, command: Sequence[str], *, answer: str = "") -> str:
        """Run a command that changes nothing and return what it printed."""

    def order(self, command: Sequence[str], lines: Sequence[str] = ()) -> str:
        """Run a command that changes something, and may do so twice; return what it printed."""

    def test(self, script: Path, options: Mapping[str, str] | None = None) -> str:
        """Ask Slurm whether it would accept the script, with these options of sbatch; queues nothing."""


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
        except SchedulerError as error:  # what else it refuses says nothing of nodes
            if isinstance(error, NoAnswerError):
                raise
            return not says_too_few_nodes(error)
        return True

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        self._slurm.order(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}"])

    def do_with(self, job_id: str, few: MinimumNodes) -> None:
        self._slurm.order(["scontrol", "update", f"JobId={job_id}", *fewer_nodes_changes(few)])


def says_too_few_nodes(error: SchedulerError) -> bool:
    """Whether sbatch refuses a job because the nodes that it may have are too few."""
    return _NO_NODES.search(error.message) is not None


def fewer_nodes_changes(few: MinimumNodes | None) -> list[str]:
    """Changes by which a job starts with fewer nodes: of these alone Slurm would still have all of its tasks there."""
    return [] if few is None else [f"NumNodes={few.nodes}-{few.of}", f"NumTasks={few.tasks}"]
