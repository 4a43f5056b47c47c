"""The plan is the wish; what Slurm did to a job is a fact; what a person changed is kept, shown, and revocable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.control.chain.requested_options import has_less_time, note_changes, read_requests, wished_options
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Job
from tests.history import make_history
from tests.plans import plan_with

ACCEPTED = {"partition": "debug", "account": "root", "qos": "normal", "nodes": "2", "time": "01:00:00"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = make_history(tmp_path / "run", lines=10, attempts=1)
    accepted(run)
    return run


def accepted(run: Run, **options: str) -> None:
    known = read_requests(run)
    replace(known, accepted={**known.accepted, "7": ACCEPTED | options}).write(run.requests)


def plan(run: Run, **changes: object) -> Plan:
    return plan_with(Plan.load(run), **({"scheduler": "slurm", "nodes": 2, "time_limit": 3600} | changes))  # type: ignore[arg-type]


def job(state: str = "RUNNING", job_id: str = "7", failed_on: str = "", **options: str) -> Job:
    return Job(id=job_id, name="j", state=state, options=ACCEPTED | options, begin_failed_on=failed_on)


@pytest.mark.parametrize(
    ("allowed", "got"),
    [
        ({}, {"time": "00:08:00"}),  # `time-min`, a plugin, a person who slips into a hole
        ({"partition": "debug,low"}, {"partition": "low"}),
        ({"nodes": "1-3"}, {"nodes": "2"}),
        ({}, {"mem": "2048M", "cpus-per-task": "2"}),  # what Slurm reports of a job that runs
        ({"partition": "gpu", "qos": "site"}, {"partition": "gpu", "qos": "site"}),  # a plugin's
    ],
)
def test_what_slurm_gave_a_job_is_no_wish(run: Run, allowed: dict[str, str], got: dict[str, str]) -> None:
    accepted(run, **allowed)
    note_changes(run, plan(run), job(**got))
    assert wished_options(run) == {}


def test_what_a_person_changed_is_kept_and_revoked_by_the_value_before(run: Run) -> None:
    note_changes(run, plan(run), job("PENDING", partition="low", reservation="camp"))
    assert wished_options(run) == {"partition": "low", "reservation": "camp"}
    assert read_requests(run).changes["partition"] == {"value": "low", "job": "7", "instead": "debug"}
    note_changes(run, plan(run), job(partition="low", reservation="camp"))  # it begins
    assert wished_options(run) == {"partition": "low", "reservation": "camp"}
    note_changes(run, plan(run), job("PENDING", partition="debug", reservation="camp"))
    assert wished_options(run) == {"reservation": "camp"}


def test_options_of_a_job_that_a_person_queued_are_wishes_but_for_its_time(run: Run) -> None:
    given = plan(run, sbatch_options={"account": "root"})
    note_changes(run, given, job(job_id="1", qos="high", exclude="n3", time="00:08:00"))
    assert wished_options(run) == {"partition": "debug", "qos": "high", "exclude": "n3"}
    assert has_less_time(run, given, job(job_id="1", time="00:08:00"))


def test_options_that_a_launchers_job_got_unasked_are_no_wish(run: Run) -> None:
    given = plan(run, sbatch_options={"qos": "normal"})
    default = {"partition": "debug", "account": "root", "qos": "low"}
    note_changes(run, given, job(job_id="1"), defaults=lambda: default)
    assert wished_options(run) == {}
    note_changes(run, given, job(job_id="2", account="proj", qos="low"), defaults=lambda: default)
    assert wished_options(run) == {"account": "proj", "qos": "low"}
    note_changes(run, given, job(job_id="7"), defaults=lambda: pytest.fail("only for a job that a person queued"))


def test_a_job_of_which_the_answer_of_slurm_is_not_known_is_compared_from_then_on(run: Run) -> None:
    replace(read_requests(run), accepted={"7": {}}).write(run.requests)
    note_changes(run, plan(run), job("PENDING", partition="low"))
    assert wished_options(run) == {}
    note_changes(run, plan(run), job("PENDING", partition="fast"))
    assert wished_options(run) == {"partition": "fast"}


def test_a_job_of_the_chain_of_which_a_full_disk_took_no_record_is_compared_from_then_on(run: Run) -> None:
    late = replace(job(job_id="8", reservation="camp"), of_chain=True)  # its cluster's partition, account and QOS
    note_changes(run, plan(run), replace(late, state="PENDING"))
    assert wished_options(run) == {}
    note_changes(run, plan(run), replace(late, options=late.options | {"partition": "low"}))
    assert wished_options(run) == {"partition": "low"}


def test_nodes_that_the_chain_left_out_are_no_wish(run: Run) -> None:
    accepted(run, exclude="n3")
    note_changes(run, plan(run), job(exclude="n0,n3", failed_on="n1"))
    assert wished_options(run) == {}
    note_changes(run, plan(run, nodes=3, spare_nodes=1), job(nodes="3"))  # it lost one
    assert wished_options(run) == {}


def test_less_time_is_less_than_sbatch_accepted_or_than_the_plan(run: Run) -> None:
    assert has_less_time(run, plan(run), job(time="00:08:00"))
    assert not has_less_time(run, plan(run), job())
    assert not has_less_time(run, plan(run), job(time="UNLIMITED"))
    accepted(run, time="00:08:00")  # the site allows no more
    assert not has_less_time(run, plan(run), job(time="00:08:00"))


def test_a_damaged_record_leaves_the_plan(run: Run) -> None:
    run.requests.write_text("{")
    assert wished_options(run) == {}
    note_changes(run, plan(run), job("PENDING", partition="low"))
