"""The nodes of a Slurm cluster: how many a job can use, and whether a refusal means that they are away for now."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from relayrun.control.rundir.plan import Plan
from relayrun.control.scheduler.base import MinimumNodes, UsableNodes
from relayrun.control.scheduler.slurm_commands import NoAnswerError, SlurmCommands, gpu_options_like_script
from relayrun.errors import SchedulerError

_NO_NODES = re.compile("node configuration is not available|[Nn]odes? not available|Invalid node name")
"""Messages of sbatch if too few nodes are up and not excluded, or if a requested node is excluded or does not exist."""
_AWAY = re.compile("node configuration is not available|[Nn]odes? not available")
"""Messages of `sbatch --test-only` for a job that sbatch queues: it waits for a drained node, or for a maintenance."""
_UNUSABLE = ("drain", "maint", "reserved", "down", "fail", "unknown", "reboot", "power", "planned")
"""How Slurm's words begin for the state of a node that no job can use now."""
NODES_TEST_SECONDS = 20.0
"""Time limit of sbatch, retries included, for `enough_up`, the most expensive question to the controller."""


class SlurmNodes(UsableNodes):
    """The nodes of a Slurm cluster."""

    def __init__(self, slurm: SlurmCommands, hasty: SlurmCommands) -> None:
        self._slurm, self._hasty = slurm, hasty

    def expand(self, nodes: str) -> list[str]:
        return self._slurm.ask(["scontrol", "show", "hostnames", nodes]).split()

    def all_nodes(self) -> set[str]:
        return set(self._slurm.ask(["sinfo", "--noheader", "--Node", "--format=%N"]).split())

    def enough_up(self, plan: Plan, script: Path, options: Mapping[str, str]) -> bool:
        try:
            self._hasty.test(script, gpu_options_like_script(options, plan.sbatch_options))
        except SchedulerError as error:  # other refusals do not concern nodes
            if isinstance(error, NoAnswerError):
                raise
            if says_too_few_nodes(error):  # after a reconfigure a controller knows no node for a moment
                return "unknown" in self._slurm.ask(["sinfo", "--noheader", "--Node", "--format=%T"])
        return True

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        self._slurm.update_job(job_id, f"ExcNodeList={','.join(nodes)}")

    def allow_fewer(self, job_id: str, minimum: MinimumNodes) -> None:
        self._slurm.update_job(job_id, *minimum_changes(minimum))


def unusable_nodes(slurm: SlurmCommands, error: SchedulerError) -> list[str]:
    """Return the nodes, with their states, for which a job waits that sbatch refuses by this error when it tests it:
    sbatch queues it. Empty if the error has another cause, or if Slurm does not answer."""
    if not _AWAY.search(error.message):
        return []
    try:
        rows = [line.split() for line in slurm.ask(["sinfo", "--noheader", "--Node", "--format=%N %T"]).splitlines()]
    except SchedulerError:
        return []
    return sorted({f"{row[0]} ({row[1]})" for row in rows if len(row) == 2 and row[1].startswith(_UNUSABLE)})


def says_too_few_nodes(error: SchedulerError) -> bool:
    """True if sbatch refused a job because too few nodes may be used."""
    return _NO_NODES.search(error.message) is not None


def minimum_changes(minimum: MinimumNodes | None) -> list[str]:
    """Return the changes by `scontrol update` that let a job start with fewer nodes; none without a minimum."""
    if minimum is None:
        return []
    # without NumTasks Slurm would keep the tasks of all nodes
    return [f"NumNodes={minimum.nodes}-{minimum.wanted}", f"NumTasks={minimum.tasks}"]
