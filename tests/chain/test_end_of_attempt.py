"""What the end of an attempt records and starts, beside the chain itself."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest

from relayrun.control import decisions
from relayrun.control.chain import campaign, excluded_nodes, failover, requested_options, supervisor
from relayrun.control.rundir import node_health
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import stop_reason, write_stop
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import SchedulerError
from tests.history import trained
from tests.plans import plan_with

from .exhaustion import Reached, run_child
from .test_exhaustion import Stage, fresh_begin, stage  # noqa: F401 - a fixture
from .test_fallback_job import run_fallback_job
from .test_real_limits import begun_in_a_reservation


@pytest.fixture
def begun(stage: Stage) -> Stage:  # noqa: F811
    """An attempt has begun."""
    assert fresh_begin(stage).code == 0
    return stage


def ends(stage: Stage, code: int, *, number: int = 4) -> Reached:  # noqa: F811
    return run_child(lambda: supervisor.end_attempt(stage.run, number, code), stage.run_path, stage.slurm)


def says(monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> None:
    """Let a function print its name and its keywords instead."""
    monkeypatch.setattr(where, name, lambda *_, **given: print(f"called {name} {given}", flush=True))


@pytest.mark.parametrize(("code", "told"), [(0, 0), (1, 1), (decisions.UNKNOWN_EXIT_CODE, None)])
def test_a_foreign_program_is_told_how_all_its_ranks_left_if_that_is_known(
    begun: Stage, monkeypatch: pytest.MonkeyPatch, code: int, told: int | None
) -> None:
    attempt, program = begun.run.attempt(4), Mock()
    monkeypatch.setattr(supervisor, "trainer_of", Mock(return_value=program))
    supervisor._conclude(begun.run, Plan.load(begun.run), attempt, attempt.started_record(), code)
    assert program.follow.return_value.conclude.call_args.args == (told,)


@pytest.mark.parametrize(("code", "recorded"), [(0, False), (1, True)])
def test_the_surroundings_of_a_failure_are_recorded(
    begun: Stage, monkeypatch: pytest.MonkeyPatch, code: int, *, recorded: bool
) -> None:
    says(monkeypatch, supervisor.surroundings, "record_surroundings")
    if code == 0:
        trained(begun.run, 4, 30, 40)
    reached = ends(begun, code)
    assert ("called record_surroundings" in reached.output) is recorded, reached.output


def test_nodes_that_the_look_before_the_ranks_found_sick_are_left_out(
    begun: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_health, "sick_nodes", lambda _attempt: {"n7": "no /data"})
    reached = ends(begun, 1)
    assert reached.code == supervisor.EXIT_ATTEMPT_FAILED, reached.output
    assert "n7" in [each.node for each in excluded_nodes.read_node_failures(begun.run)]


def test_the_end_of_an_attempt_that_was_overtaken_changes_nothing(begun: Stage) -> None:
    begun.run.attempt(3).end.unlink()
    reached = ends(begun, 1, number=3)
    assert (reached.code, "overtaken" in reached.output) == (0, True)
    assert not begun.run.attempt(3).end.exists()


def test_the_views_of_the_run_are_written_after_the_end(begun: Stage) -> None:
    trained(begun.run, 4, 30, 40)
    begun.run.metrics_view.unlink(missing_ok=True)
    assert ends(begun, 0).code == 0
    assert '"iteration": 40' in begun.run.metrics_view.read_text()


@pytest.mark.parametrize(("over", "patient"), [("no", False), ("leaves", True), ("stop", True)])
def test_the_end_of_a_chain_starts_the_next_runs_with_patience(
    begun: Stage, monkeypatch: pytest.MonkeyPatch, over: str, *, patient: bool
) -> None:
    trained(begun.run, 4, 30, 40)
    if over == "leaves":
        plan_with(Plan.load(begun.run), auto_requeue=False).write(begun.run.plan)
    if over == "stop":
        write_stop(begun.run, ChainEnd("stopped", "stopped by ann"))
    says(monkeypatch, campaign, "start_due_members_of")
    reached = ends(begun, 0)
    wanted = supervisor.CONTROLLER_PATIENCE if patient else campaign.PATIENCE
    assert f"'patience': {wanted}" in reached.output, reached.output


@pytest.mark.parametrize(("left", "ended"), [(None, False), (100_000.0, False), (5.0, True)])
def test_a_reservation_ends_the_chain_as_soon_as_no_job_fits_before_its_end(
    stage: Stage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    left: float | None,
    *,
    ended: bool,
) -> None:
    """`left`: seconds to its end; None: Slurm does not say."""
    begun_in_a_reservation(stage)
    for job in ("1", *stage.slurm.pending(), *stage.slurm.fallback_jobs()):
        stage.slurm.set(job, reservation="camp")
    end = None if left is None else time.time() + left
    monkeypatch.setattr(Slurm, "reservation_end", lambda _, __, for_good=False: end)
    trained(stage.run, 4, 30, 40)
    ends(stage, 0)
    assert (stop_reason(stage.run) or "").startswith("reservation camp ends at ") is ended
    assert (stop_reason(stage.run) is None, len(stage.slurm.pending())) == (not ended, int(not ended))


def test_what_slurm_accepted_is_left_out_where_it_does_not_answer(
    begun: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Mock(side_effect=SchedulerError("no answer"))
    monkeypatch.setattr(requested_options, "scheduler_for_plan", lambda *_, **__: Mock(query=slurm))
    requested_options.record_accepted(begun.run, Plan.load(begun.run), "77")
    assert requested_options.read_requests(begun.run).accepted["77"] == {}


def test_a_fallback_job_that_ends_the_chain_starts_the_runs_behind_it(
    begun: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, failover.campaign, "start_due_members_of")
    for job in ("1", *begun.slurm.pending()):
        begun.slurm.set(job, state="CANCELLED")
    reached = run_fallback_job(begun)
    assert reached is not None
    assert "called start_due_members_of" in reached.output, reached.output
