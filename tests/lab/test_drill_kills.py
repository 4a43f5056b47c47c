"""The report of random kills: its figures, and the claims that do not hold."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.restarts import FailedRestart
from relayrun.control.rundir.run import Run
from relayrun.files import append_line
from relayrun.lab import compare_runs
from relayrun.train.checkpoint import checksums
from tests import random_kills
from tests.history import began
from tests.random_kills import KillEvent, KillReport

FAILED = FailedRestart(
    restart=1,
    time=100.0,
    rank=1,
    node="n1",
    words="killed by SIGKILL",
    iteration=4,
    base_iteration=0,
    durable_iteration=0,
    next_iteration=4,
    source="memory",
    again=True,
    seconds={"end": 0.5},
)


def step(run: Run, iteration: int, time: float, *, attempt: int = 1, seconds: float = 1.0) -> None:
    line = {"iteration": iteration, "loss": 2.0, "grad_norm": 0.5, "step_seconds": seconds, "time": time}
    append_line(run.attempt(attempt).metrics, line)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Four steps of a second each, from 96 to 100."""
    run = Run(tmp_path / "run")
    began(run, 1)
    for iteration in range(1, 5):
        step(run, iteration, 96.0 + iteration)
    return run


def test_an_undisturbed_run_is_effective_all_the_time(run: Run) -> None:
    line = random_kills.measure_timeline(run)
    assert (line.began, line.ended, line.share, line.steps, line.steps_lost, line.step) == (96, 100, 1, 4, 0, 1)


def test_a_run_without_a_step_has_no_timeline(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    began(run, 1)
    with pytest.raises(ValueError, match="has done no step"):
        random_kills.measure_timeline(run)


def test_the_way_back_is_lost_where_no_step_is(run: Run) -> None:
    """No line of the metrics says that a restart began: it begins behind the newest iteration."""
    replace(FAILED, time=100.2).append(run.attempt(1).failed_restarts)
    step(run, 5, 104.0)
    step(run, 6, 105.5)
    line = random_kills.measure_timeline(run)
    assert (line.seconds, line.effective, line.steps_lost) == (9.5, 4 + 1 + 1.5, 0)


def test_a_step_that_is_done_while_the_round_ends_does_not_count_the_way_back(run: Run) -> None:
    replace(FAILED, time=100.2).append(run.attempt(1).failed_restarts)
    step(run, 5, 100.4, seconds=0.4)  # rank 0 comes so far before it is ended
    step(run, 6, 105.0)
    assert random_kills.measure_timeline(run).effective == pytest.approx(4 + 0.4 + 1)


def test_steps_that_are_done_again_count_once(run: Run) -> None:
    replace(FAILED, time=100.2, next_iteration=2).append(run.attempt(1).failed_restarts)
    append_line(run.attempt(1).metrics, {"iteration": 2, "restart": 2})
    for iteration in (3, 4, 5):
        step(run, iteration, 100.0 + iteration)
    line = random_kills.measure_timeline(run)
    assert (line.effective, line.steps, line.steps_lost, line.seconds) == (2 + 3, 5, 2, 9)


def test_what_the_next_job_does_again_counts_once(run: Run) -> None:
    began(run, 2, base=3)
    step(run, 4, 200.0, attempt=2)
    line = random_kills.measure_timeline(run)
    assert (line.effective, line.steps, line.steps_lost, line.seconds) == (3 + 1, 4, 1, 104)


def view(run: Run, last: int, changes: dict[int, dict[str, Any]] | None = None) -> Run:
    """A run whose merged view has these iterations, with an evaluation at the last one."""
    run.path.mkdir(exist_ok=True)
    for number in range(1, last + 1):
        line = {
            "iteration": number,
            "loss": 1 / number,
            "grad_norm": 0.1,
            "global_batch_size": 8,
            "consumed_samples": 8 * number,
        }
        append_line(run.metrics_view, line | (changes or {}).get(number, {}))
    append_line(run.metrics_view, {"iteration": last, "validation": {"all": 0.1}, "time": float(last)})
    return run


def test_equal_losses_are_equal(tmp_path: Path) -> None:
    one, other = view(Run(tmp_path / "one"), 5), view(Run(tmp_path / "other"), 5)
    assert compare_runs.loss_differences(one, other, 5) == []
    assert random_kills.sample_gaps(one, 5) == []


def test_a_part_of_a_run_is_compared_with_that_part_of_the_undisturbed_one(tmp_path: Path) -> None:
    one, other = view(Run(tmp_path / "one"), 5), view(Run(tmp_path / "other"), 9)
    append_line(other.metrics_view, {"iteration": 5, "validation": {"all": 0.1}, "time": 5.0})
    assert compare_runs.loss_differences(one, other, 5) == []
    assert len(compare_runs.loss_differences(other, one, 9)) == 5, "four iterations and an evaluation"


def test_each_kind_of_fault_has_its_seconds() -> None:
    events = [
        KillEvent(time=10.0, kind="kill", rank=3, node="n1"),
        KillEvent(time=20.0, kind="kill", rank=2, node="n1"),
        KillEvent(time=30.0, kind="stop", rank=0, node="n0"),
        KillEvent(time=60.0, kind="host", node="n0"),  # was not noticed
    ]
    failed = [
        replace(FAILED, time=10.25, steps_lost=1, seconds={"end": 0.5, "all": 1.5}),
        replace(FAILED, time=20.5, iteration=4, base_iteration=4, seconds={"end": 0.5, "all": 3.0}),
        replace(FAILED, time=42.0, iteration=9, seconds={"end": 1.0}),
    ]
    alike = {"kill": 0.25, "kill in set-up": 0.5, "stop": 12.0}
    found = replace(SHOWN, events=events, failed=failed).by_fault()
    assert {kind: values["noticed"]["max"] for kind, values in found.items()} == alike
    assert found["kill"]["next_step"] == {"median": 1.5, "p95": 1.5, "max": 1.5}
    assert (found["kill"]["most_steps_lost"], found["stop"]["restarts"], found["stop"]["next_step"]) == (1, 1, {})


def test_a_batch_host_that_is_lost_begins_the_job_again() -> None:
    host = [*SHOWN.events, KillEvent(time=30.0, kind="host", node="n0")]
    shown = replace(SHOWN, events=host, failed=[*SHOWN.failed, replace(FAILED, restart=3, rank=None, lost={"n0": ""})])
    assert replace(shown, restarts=1).failed_claims(spares=1) == []
    assert replace(shown, restarts=0).failed_claims(spares=1) != []
    assert replace(shown, restarts=1, failed=SHOWN.failed).failed_claims(spares=1) != []
    assert replace(SHOWN, restarts=1).failed_claims(spares=1) != []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({3: {"loss": 1 / 3 + 2**-54}}, "iteration 3: "),  # the last bit
        ({2: {"grad_norm": 0.2}}, "iteration 2: "),
        ({5: {"iteration": 4}}, "iteration 4 stands twice"),
        ({5: {"iteration": 6}}, "iteration 5: None, undisturbed "),
    ],
)
def test_losses_that_differ_are_found(tmp_path: Path, changes: dict[int, dict[str, Any]], words: str) -> None:
    one, other = view(Run(tmp_path / "one"), 5, changes), view(Run(tmp_path / "other"), 5)
    assert any(fault.startswith(words) for fault in compare_runs.loss_differences(one, other, 5))


def test_iterations_that_both_lack_are_found(tmp_path: Path) -> None:
    one, other = view(Run(tmp_path / "one"), 5), view(Run(tmp_path / "other"), 5)
    assert compare_runs.loss_differences(one, other, 6) == ["iteration 6: None, undisturbed None"]
    assert random_kills.sample_gaps(one, 6) == ["5 iterations, not 6"]


def test_an_evaluation_that_differs_is_found(tmp_path: Path) -> None:
    one, other = view(Run(tmp_path / "one"), 2), view(Run(tmp_path / "other"), 2)
    append_line(one.metrics_view, {"iteration": 3, "validation": {"all": 0.1}})
    assert len(compare_runs.loss_differences(one, other, 2)) == 1


@pytest.mark.parametrize("changes", [{"consumed_samples": 16}, {"consumed_samples": 32}, {"iteration": 4}])
def test_samples_that_are_repeated_or_left_out_are_found(tmp_path: Path, changes: dict[str, Any]) -> None:
    (fault,) = random_kills.sample_gaps(view(Run(tmp_path / "one"), 5, {3: changes}), 5)
    assert "where iteration 3 was to end with 24" in fault


def checkpoint(run: Run, values: bytes, *, key: str = "weight") -> Path:
    began(run, 1)
    folder = run.checkpoint(5)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(values)
    block = checksums.ChecksumBlock(
        key=key,
        offset=[0],
        shape=[len(values)],
        dtype="uint8",
        file="__0_0.distcp",
        at=0,
        bytes=len(values),
        values_bytes=len(values),
        values=xxhash.xxh3_128_hexdigest(values),
        frame=xxhash.xxh3_128_hexdigest(b""),
    )
    known = checksums.write_block_checksums(folder, 0, 5, [block], {"__0_0.distcp": len(values)})
    root = checksums.write_checksum_index(folder, 5, known)
    run.attempt(1).append_commit(
        CheckpointCommit(iteration=5, path=str(folder), consumed_samples=40, time=1.0, seconds=1.0, checksum=root)
    )
    return folder


def test_weights_are_compared_by_their_bytes(tmp_path: Path) -> None:
    one = checkpoint(Run(tmp_path / "one"), b"abcd")
    assert compare_runs.checkpoint_differences(one, checkpoint(Run(tmp_path / "same"), b"abcd")) == (1, [])
    assert compare_runs.checkpoint_differences(one, checkpoint(Run(tmp_path / "bit"), b"abce")) == (
        1,
        ["weight at [0] differs"],
    )
    found = compare_runs.checkpoint_differences(one, checkpoint(Run(tmp_path / "name"), b"abcd", key="bias"))
    assert found == (1, ["bias at [0] differs", "weight at [0] differs"])


def test_bytes_that_do_not_fit_their_hash_are_found_though_the_hashes_are_equal(tmp_path: Path) -> None:
    one, other = (checkpoint(Run(tmp_path / name), b"abcd") for name in ("one", "other"))
    (other / "__0_0.distcp").write_bytes(b"abce")
    tensors, faults = compare_runs.checkpoint_differences(one, other)
    assert tensors == 1
    assert "the values of weight in __0_0.distcp are not those that were saved" in faults[0]


LINE = random_kills.Timeline(began=0, ended=100, effective=95, steps=90, steps_lost=2, step=1.0)
LOST = replace(FAILED, restart=2, rank=None, lost={"n1": "n4"})
SHOWN = KillReport(
    timeline=LINE,
    jobs=["7"],
    restarts=0,
    events=[KillEvent(time=10.0, kind="kill", rank=3, node="n1"), KillEvent(time=20.0, kind="node", node="n1")],
    failed=[FAILED, LOST],
    tensors=50,
    faults={"losses": [], "weights": [], "samples": []},
    memory_interval=3,
)


def test_what_holds_is_no_complaint() -> None:
    assert SHOWN.failed_claims(spares=1) == []
    few = [replace(FAILED, steps_lost=3), replace(LOST, source="neighbour", steps_lost=6)]
    assert replace(SHOWN, failed=few).failed_claims(spares=1) == []
    assert replace(SHOWN, failed=[FAILED, replace(LOST, source="disk", steps_lost=90)]).failed_claims(spares=1) == []
    figures = SHOWN.figures()
    assert (figures["counted_share"], figures["kills"], figures["nodes_lost"], figures["jobs"]) == (0.95, 1, 1, 1)
    assert figures["events"][0] == asdict(SHOWN.events[0])
    assert figures["restarts_from"] == {"memory": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"faults": {"losses": ["iteration 3: 1, undisturbed 2"]}}, "losses: iteration 3"),
        ({"faults": {"weights": ["weight differs"]}}, "weights: weight differs"),
        ({"tensors": 0}, "weights: no tensor was compared"),
        ({"jobs": ["7", "8"]}, "one job: it took 2"),
        ({"restarts": 1}, "one job: it took 1, restarted 1 times"),
        ({"failed": [FAILED]}, "1 nodes were lost, and 0 are on record"),
        ({"failed": [FAILED, LOST, replace(FAILED, restart=3)]}, "2 faults, and 3 failed restarts"),
        ({"events": [], "failed": []}, "nothing was killed"),
        ({"failed": [replace(FAILED, steps_lost=4), LOST]}, "copies every 3 steps at most: 4 were lost"),
        ({"failed": [FAILED, replace(LOST, source="neighbour", steps_lost=7)]}, "copies every 3 steps at most: 7"),
    ],
)
def test_what_does_not_hold_is_named(changes: dict[str, Any], words: str) -> None:
    assert any(claim.startswith(words) for claim in replace(SHOWN, **changes).failed_claims(spares=1))


def test_a_run_that_ends_before_the_first_fault_has_figures() -> None:
    shown = replace(SHOWN, events=[], failed=[])
    assert (shown.figures()["kills"], shown.figures()["by_fault"]) == (0, {})


def test_with_fewer_spares_than_lost_nodes_there_may_be_several_jobs() -> None:
    assert replace(SHOWN, jobs=["7", "8"]).failed_claims(spares=0) == []
