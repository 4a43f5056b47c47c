"""What is read of Slurm's answers that have no JSON on every version, by answers recorded on each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relayrun.control.scheduler import slurm_commands
from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.error_lines import first_failure, task_ends
from relayrun.control.scheduler.slurm import Slurm
from relayrun.control.scheduler.slurm_commands import KNOWN_SBATCH_OPTIONS, parse_job
from relayrun.control.scheduler.slurm_nodes import says_too_few_nodes
from relayrun.errors import SchedulerError

FOLDER = Path(__file__).parent / "slurm_answers"
VERSIONS = sorted(path.stem for path in FOLDER.glob("*.txt"))


def answers(version: str) -> dict[str, str]:
    """The recorded answers of a version, by question."""
    parts = re.split(r"^== (.*)\n", (FOLDER / f"{version}.txt").read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(params=VERSIONS)
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The answers of one version, which Slurm's commands give in this test."""
    found = answers(request.param)

    def answer(command: list[str], *_: object, **__: object) -> str:
        said = next((text for question, text in found.items() if question.split()[:3] == command[:3]), None)
        if said is None:
            raise SchedulerError(f"{command[0]}: not recorded")
        return said

    monkeypatch.setattr(slurm_commands, "run_slurm_command", answer)
    return found


def test_there_are_answers_of_three_versions() -> None:
    assert VERSIONS == ["22.05", "24.11", "26.05"]


def test_a_job_with_fields_in_its_name_is_read(recorded: dict[str, str]) -> None:
    job = parse_job(recorded["scontrol show job --oneliner"])
    assert (job.name, job.state, job.nodes) == ("x JobState=COMPLETED NodeList=n9 Power=", "RUNNING", "n0")
    assert (job.batch_host, job.requeue, job.restarts, job.begin_failed_on) == ("n0", True, 0, "n0,n7")
    assert (job.end_time or 0) - (job.start_time or 0) == 300
    wanted = {"time": "00:05:00", "exclude": "n3", "mem": "100M", "gpus-per-node": "2", "partition": "debug"}
    assert wanted.items() <= job.options.items()


def test_partitions_settings_and_the_clock_are_read(recorded: dict[str, str]) -> None:
    slurm = Slurm(patience=0.0)
    (partition,) = slurm.partitions()
    assert (partition["PartitionName"], partition["Default"], partition["MinNodes"]) == ("debug", "YES", "0")
    assert (slurm.kill_wait(), slurm.max_array_size()) == (3.0, 1001)
    assert abs((slurm.clock() or 0.0) - 1795767800) < 3600
    assert slurm_commands.own_cluster_name().startswith("test")


def test_the_comment_of_a_reservation_changes_none_of_its_fields(recorded: dict[str, str]) -> None:
    """Newer Slurm prints a comment, in which an operator may write what he likes: `Flags=X`."""
    if "scontrol show reservation --oneliner" not in recorded:  # 22.05 takes no comment
        return
    reservation = Slurm(patience=0.0)._reservations()["m"]
    assert "MAINT" in reservation["Flags"].split(",")
    assert float(reservation["EndTime"]) - float(reservation["StartTime"]) == 3600
    job = Job(id="7", name="j", state="RUNNING", nodes="n[0-1]", start_time=1.0, end_time=2e9)
    assert Slurm(patience=0.0).job_end(job) == (float(reservation["StartTime"]), "maintenance m begins")


def test_no_task_of_a_cancelled_step_failed_by_itself(recorded: dict[str, str]) -> None:
    log = recorded["standard error of a cancelled step, and of a cancelled job"]
    for part in (log, log[: log.rindex("Job step aborted")], log[log.rindex("Job step aborted") :]):
        assert [end.nodes for end in task_ends(part)]
        assert first_failure(part, []) is None


def test_refusals_are_known(recorded: dict[str, str]) -> None:
    lines = recorded["refusals"].splitlines()
    assert [says_too_few_nodes(SchedulerError(line)) for line in lines[:2]] == [True, True]
    assert all("Invalid job id" in line for line in lines[2:])
    assert not any(slurm_commands._NO_ANSWER.search(line) for line in lines)
    assert slurm_commands._NO_ANSWER.search("Resource temporarily unavailable for job 255")


@pytest.mark.parametrize("name", ["tres-per-task", "segment", "extra", "oom-kill-step", "stepmgr", "acctg-freq"])
def test_options_of_newer_versions_are_known(name: str) -> None:
    assert name in KNOWN_SBATCH_OPTIONS


@pytest.mark.parametrize("task", ["task 0", "tasks 0-3"])
def test_a_cancelled_step_of_one_node_blames_it_for_nothing(task: str) -> None:
    """Seen by `relayrun site probe`: with one line of srun no peer tells that the task failed by itself."""
    lines = ["slurmstepd-n0: error: *** STEP 3.3 ON n0 CANCELLED AT 2026-11-27T11:29:38 ***"]
    log = "\n".join([*lines, "srun: Job step aborted: Waiting up to 5 seconds.", f"srun: error: n0: {task}: Killed"])
    assert first_failure(log, []) is None
    assert first_failure(f"srun: error: n0: {task}: Killed\n", []) is not None  # by the kernel, out of memory
