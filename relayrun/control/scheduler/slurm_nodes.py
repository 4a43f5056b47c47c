"""The nodes of a Slurm cluster: how many a job can use, and whether a refusal means that they are away for now."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from relayrun.control.rundir.plan import Plan
from relayrun.control.scheduler.base import MinimumNodes, UsableNodes
from relayrun.control.scheduler.error_lines import expand_nodelist
from relayrun.control.scheduler.slurm_commands import NoAnswerError, SlurmCommands, count_gpus, gpu_options_like_script
from relayrun.errors import SchedulerError
from relayrun.slurmtime import format_time, parse_time

_NO_NODES = re.compile("node configuration is not available|[Nn]odes? not available|Invalid node name")
"""Messages of sbatch if too few nodes are up and not excluded, or if a requested node is excluded or does not exist."""
_AWAY = re.compile("node configuration is not available|[Nn]odes? not available")
"""Messages of `sbatch --test-only` for a job that sbatch queues: it waits for a drained node, or for a maintenance."""
_HEADER = re.compile(r"^#SBATCH +--([a-z-]+)[= ]\"?([^\s\"]*)", re.M)
_UNUSABLE = ("drain", "maint", "reserved", "down", "fail", "unknown", "reboot", "power", "planned")
"""How Slurm's words begin for the state of a node that no job can use now."""
_RESERVATION = re.compile(r"ReservationName=(\S+).*\bNodes=(\S+)")
"""Name and nodes of a reservation: a job that would not end before it waits for its end, and its nodes are idle."""
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


def first_test(slurm: SlurmCommands, script: Path, options: Mapping[str, str], spare_nodes: int) -> tuple[str, str]:
    """Return sbatch's words on a script with these options, or a warning if the job fits the cluster and waits for
    nodes that are away: sbatch queues it, but refuses to test it. Raises SchedulerError."""
    try:
        return " ".join(slurm.test(script, options).split()), ""
    except SchedulerError as error:
        if not _AWAY.search(error.message):
            raise
        asked = {**dict(_HEADER.findall(script.read_text(encoding="utf-8", errors="replace"))), **options}
        if spare_nodes:
            nodes = f"job.nodes and job.spare_nodes ask for {asked.get('nodes')} nodes"
            error.hint = f"{nodes}; where so many are not up, set job.spare_nodes to fewer"
        if spare_nodes or not (away := _nodes_to_wait_for(slurm, asked)):
            raise
        return "", f"too few nodes can be used now; the job waits for some of {', '.join(away)}"


def _nodes_to_wait_for(slurm: SlurmCommands, asked: Mapping[str, str]) -> list[str]:
    """Return the nodes, with their states, that cannot be used now and fit a job with these options. Empty if the job
    would not fit if all nodes were up, or if Slurm does not answer."""
    try:
        lines = slurm.ask(["sinfo", "--noheader", "--all", "--Node", "--format=%P|%N|%T|%c|%m|%G|%f"]).splitlines()
    except SchedulerError:
        return []
    said = ""
    with contextlib.suppress(SchedulerError):
        said = slurm.ask(["scontrol", "show", "reservation", "--oneliner"])
    coming = {
        node: f"reserved by {name}" for name, nodes in _RESERVATION.findall(said) for node in expand_nodelist(nodes)
    }
    found: dict[str, dict[str, str]] = {}
    names, excluded = asked.get("partition", "*").split(","), expand_nodelist(asked.get("exclude", ""))
    for partition, node, state, *resources in (line.split("|") for line in lines if line.count("|") == 6):
        chosen = partition.endswith("*") if names == ["*"] else partition.rstrip("*") in names
        if chosen and node not in excluded and _fits(asked, *resources):
            away = state if state.startswith(_UNUSABLE) else coming.get(node, "")
            found.setdefault(partition, {})[node] = away
    least = int(re.findall(r"\d+", asked.get("nodes", "1"))[0])
    waiting = (node for nodes in found.values() if len(nodes) >= least for node in nodes.items())
    return sorted({f"{node} ({why})" for node, why in waiting if why})


def _fits(asked: Mapping[str, str], cpus: str, memory: str, gres: str, features: str) -> bool:
    """True if a node of this size, in sinfo's words, has what a job asks for on each node."""
    cores = int(asked.get("ntasks-per-node", 1)) * int(asked.get("cpus-per-task", 1))
    gpus = max(map(count_gpus, [asked.get("gres", ""), f"gpu:{asked.get('gpus-per-node', 0)}"]))
    number, unit = re.findall(r"^(\d*)([KMGT]?)", asked.get("mem", "").upper())[0]
    size = int(number or 0) * 1024.0 ** ("KMGT".index(unit or "M") - 1)
    wanted = {each for each in asked.get("constraint", "").split("&") if each.isalnum()}
    enough = cores <= int(cpus) and size <= int(memory) and gpus <= count_gpus(gres)
    return enough and wanted <= {*features.split(",")}


def says_too_few_nodes(error: SchedulerError) -> bool:
    """True if sbatch refused a job because too few nodes may be used."""
    return _NO_NODES.search(error.message) is not None


def minimum_changes(minimum: MinimumNodes | None) -> list[str]:
    """Return the changes by `scontrol update` that let a job start with fewer nodes; none without a minimum."""
    if minimum is None:
        return []
    # without NumTasks Slurm would keep the tasks of all nodes
    return [f"NumNodes={minimum.nodes}-{minimum.wanted}", f"NumTasks={minimum.tasks}"]


def chosen_partitions(rows: Sequence[dict[str, str]], asked: str | None) -> list[dict[str, str]]:
    """Return the fields of the partitions that a job asks for, or of the default one."""
    names = asked.split(",") if asked else []
    return [row for row in rows if (row["PartitionName"] in names if names else row.get("Default") == "YES")]


def exceeded_limits(partitions: Sequence[Mapping[str, str]], plan: Plan) -> list[tuple[str, str]]:
    """Return the setting and words for each limit for which sbatch queues a job that never starts; empty if one of the
    partitions takes it."""
    nodes, found = plan.nodes_of_job, []
    for row in partitions:
        limit, name = row.get("MaxTime", "UNLIMITED"), f"partition {row['PartitionName']}"
        most, least, there = (row.get(field, "") for field in ("MaxNodes", "MinNodes", "TotalNodes"))
        long = limit not in ("UNLIMITED", "INFINITE") and plan.time_limit > parse_time(limit)
        wrong = {
            f"{nodes} nodes are more than {name} allows, {most}": most.isdecimal() and nodes > int(most),
            f"{nodes} nodes are fewer than {name} asks for, {least}": least.isdecimal() and nodes < int(least),
            f"{nodes} nodes are more than {name} has, {there}": there.isdecimal() and nodes > int(there),
        }
        time = [("job.time", f"{format_time(plan.time_limit)} is more than {name} allows, {limit}")] * long
        found.append(time + [("job.nodes", words) for words, is_so in wrong.items() if is_so])
    return [limit for limits in found for limit in limits] if all(found) else []
