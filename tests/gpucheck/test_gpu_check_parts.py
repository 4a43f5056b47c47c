"""The parts of a check are apart from each other: whatever becomes of one, the others have their rows."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun import places
from relayrun.config.compose import resolve
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError, RelayrunError
from relayrun.files import append_line
from relayrun.lab.compare_runs import AttemptValues, first_difference
from relayrun.lab.gpucheck import check, performance, report, runs
from relayrun.lab.gpucheck.check import PARTS, CheckPart
from relayrun.lab.gpucheck.performance import affordable_layers, estimated_micro_batch
from relayrun.lab.gpucheck.resume import attempt_values
from relayrun.lab.gpucheck.setup import DIGESTS_FILE, CheckFailed, CheckSetup, PartFigures
from relayrun.train.model.size import memory_bytes
from tests.waiting import wait_for

PLANTED = "tests.gpucheck.planted"
ROOT = Path(__file__).resolve().parents[2]


def part(name: str, *, seconds: float = 300, gpus: int = 1) -> CheckPart:
    return CheckPart(name=name, what="planted", function=f"{PLANTED}:{name}", seconds=seconds, gpus=gpus)


@pytest.mark.long
def test_a_part_that_raises_breaks_dies_or_hangs_leaves_the_others(tmp_path: Path) -> None:
    setup = CheckSetup(folder=str(tmp_path), tiny=True)
    ended = [part(name, seconds=15) for name in ("measures", "raises", "breaks", "dies", "hangs")]
    parts = [*ended, part("measures")]
    found = check.run_parts(setup, parts, lambda text: None, began=time.monotonic())
    assert [outcome.status for outcome in found] == ["done", "failed", "failed", "failed", "timeout", "done"]
    good, raised, broke, died, hung, last = found
    assert good.figures == last.figures == {"found": "CPU"}
    assert good.words is None
    assert (raised.words, raised.figures) == ("here: planted by a test", {"before": 1})
    assert broke.words is not None
    assert "ZeroDivisionError: a defect, planted by a test" in broke.words
    assert died.words is not None
    assert "exit code -6" in died.words
    assert hung.words is not None
    assert hung.words.endswith("s; the last it said: now it hangs")
    assert not Path(f"/proc/{hung.figures['sleeper']}").exists() or is_zombie(hung.figures["sleeper"])

    table = report.check_rows(check.result_record(setup, found, seconds=1.0))
    assert [row.part for row in table] == ["raises", "breaks", "dies", "hangs"]
    assert all(row.fails for row in table)
    assert report.check_exit_code(table) == 1
    assert str(tmp_path) not in str(table)


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_part_has_its_own_seconds_and_those_that_were_left_before_it(tmp_path: Path, monkeypatch: Any) -> None:
    given: list[float] = []

    def run_part(setup: CheckSetup, part: CheckPart, *, seconds: float) -> check.PartOutcome:
        given.append(seconds)
        return check.PartOutcome(name=part.name, status="done")

    monkeypatch.setattr(check, "run_part", run_part)
    parts = [part("measures", seconds=60), part("raises", seconds=40), part("dies", seconds=20, gpus=2)]
    setup = CheckSetup(folder=str(tmp_path), tiny=False, gpus=1)
    found = check.run_parts(setup, parts, lambda text: None, began=time.monotonic() - 50, stretch=2, given=10)
    assert [round(seconds) for seconds in given] == [2 * (10 + 60) - 50, 2 * (10 + 60 + 40) - 50]
    assert (found[-1].status, found[-1].words) == ("skipped", "this machine has one GPU")


def test_all_parts_of_one_gpu_fit_the_minutes_that_the_command_promises() -> None:
    assert sum(each.seconds for each in PARTS if each.gpus == 1) == 60 * check.MINUTES
    assert sum(each.seconds for each in PARTS if each.name in ("environment", "kernels")) <= 120


def test_an_interrupted_check_has_the_rows_that_were_measured(tmp_path: Path) -> None:
    """By SIGTERM, as `timeout` and srun send it; the part that was under way keeps its figures."""
    code = f"""if True:
        import json, sys, time
        from tests.gpucheck.test_gpu_check_parts import part
        from relayrun.lab.gpucheck import check
        from relayrun.lab.gpucheck.setup import CheckSetup
        setup = CheckSetup(folder={str(tmp_path)!r}, tiny=True)
        parts = [part("measures"), part("hangs"), part("raises")]
        found = check.run_parts(setup, parts, lambda text: print(text, flush=True), began=time.monotonic())
        print(json.dumps([[each.name, each.status, sorted(each.figures)] for each in found]))
    """
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_for((tmp_path / "parts" / "hangs.json").exists)
    process.terminate()
    said = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 0
    assert json.loads(said[-1]) == [
        ["measures", "done", ["found"]],
        ["hangs", "skipped", ["sleeper"]],
        ["raises", "skipped", []],
    ]


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="this folder holds other things than a check"):
        check.prepare_folder(CheckSetup(folder=str(tmp_path), tiny=True))
    assert (tmp_path / "thesis.tex").exists()


def test_the_first_part_always_runs_and_unknown_ones_are_refused() -> None:
    assert [each.name for each in check.select_parts(["save"], check.PARTS)] == ["environment", "save"]
    assert check.select_parts([], check.PARTS) == list(check.PARTS)
    with pytest.raises(ConfigError, match=r"unknown part saves; there are: environment, kernels, "):
        check.select_parts(["saves"], check.PARTS)


def test_without_a_gpu_there_is_nothing_to_check_but_the_tiny_way(tmp_path: Path) -> None:
    setup = CheckSetup(folder=str(tmp_path), tiny=False)
    words = "torch sees no GPU here; --tiny (TINY=1) walks the same way on CPUs"
    none = check.PartOutcome(name="environment", status="failed", words=words, figures={"gpus": []})
    with pytest.raises(RelayrunError, match="torch sees no GPU here; --tiny"):
        check.with_device(setup, none)
    assert check.with_device(replace(setup, tiny=True), none).gpus == 0
    gpus = [{"name": "NVIDIA H200", "memory_bytes": 150_000_000_000}] * 2
    found = check.with_device(setup, check.PartOutcome(name="environment", status="done", figures={"gpus": gpus}))
    assert (found.gpus, found.device, found.memory_bytes, found.precision) == (
        2,
        "NVIDIA H200",
        150_000_000_000,
        "bf16",
    )


def test_a_result_goes_among_the_benchmarks_only_if_it_is_a_whole_one_of_a_gpu(tmp_path: Path) -> None:
    tiny = CheckSetup(folder=str(tmp_path), tiny=True)
    h200 = CheckSetup(folder=str(tmp_path), tiny=False, device="NVIDIA H200", gpus=1)
    assert check.result_path(tiny, partial=False) == tmp_path / "gpu-tiny.json"
    assert check.result_path(h200, partial=True) == tmp_path / "gpu-h200.json"
    assert check.result_path(h200, partial=False) == check.RESULTS_FOLDER / "gpu-h200.json"
    assert report.result_file_name("NVIDIA GH200 120GB") == "gpu-gh200-120gb.json"


def piece(**changes: Any) -> AttemptValues:
    """Make two iterations, 3 and 4, behind a resume at 2; `changes` replace what an iteration left."""
    lines = {3: {"loss": 5.2, "grad_norm": 1.5}, 4: {"loss": 5.1, "grad_norm": 1.25}}
    given: dict[str, Any] = {
        "lines": lines,
        "states": {2: "b", 3: "c", 4: "d"},
        "loaded": {2: "b"},
        "weights": {4: "w"},
    }
    return AttemptValues(**given | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"weights": {}}, None),  # it was killed
        ({"lines": {}}, "no iteration was trained"),
        ({"loaded": {2: "x"}}, "optimizer state as loaded, of iteration 2"),
        ({"lines": {3: {"loss": 5.25, "grad_norm": 1.5}}}, "loss of iteration 3: 5.25, not 5.2"),
        ({"lines": {4: {"loss": 5.1, "grad_norm": 1.5}}}, "gradient norm of iteration 4: 1.5, not 1.25"),
        ({"states": {3: "c", 4: "x"}}, "optimizer state after iteration 4, whose loss is equal"),
        ({"states": {3: "c"}}, "optimizer state after iteration 4, whose loss is equal"),
        ({"twice": ["loss of iteration 3, when"]}, "loss of iteration 3, when"),
        ({"weights": {4: "x"}}, "weights in the end, where the optimizer's state is equal"),
    ],
)
def test_the_first_thing_that_differs_is_named(changes: dict[str, Any], words: str | None) -> None:
    assert first_difference(piece(**changes), piece()) == words


def test_what_a_later_round_computes_otherwise_is_found_although_the_newest_is_right(tmp_path: Path) -> None:
    run = Run(tmp_path)
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    for iteration, loss, digest in ((1, 5.5, "a"), (2, 5.25, "b"), (2, 5.0, "c")):
        append_line(attempt.metrics, {"iteration": iteration, "loss": loss, "grad_norm": 1.0})
        note = {"attempt": 1, "kind": "state", "iteration": iteration, "ranks": [digest]}
        append_line(tmp_path / DIGESTS_FILE, note)
    assert attempt_values(run, 1).twice == [
        "loss of iteration 2, when it was computed again",
        "optimizer state of iteration 2, when it was computed again",
    ]


def test_a_loss_that_is_no_number_is_never_equal() -> None:
    broken = piece(lines={3: {"loss": float("nan"), "grad_norm": 1.5}})
    assert first_difference(broken, broken) == "loss of iteration 3: nan, not nan"


def test_a_small_disk_gets_a_model_of_fewer_layers(tmp_path: Path) -> None:
    h200 = CheckSetup(folder=str(tmp_path), tiny=False, gpus=1)
    whole = 14 * 1_235_814_400
    assert affordable_layers(h200, 8e9, 100 * 10**9) == 16
    assert affordable_layers(h200, 4e9, 100 * 10**9) == 8  # the disk is slow
    assert affordable_layers(h200, 8e9, int(2.2 * whole)) == 8
    assert affordable_layers(h200, 1e6, 100 * 10**9) == 1  # however slow
    with pytest.raises(CheckFailed, match="bytes free; two checkpoints of one layer have"):
        affordable_layers(h200, 2e9, 10**9)


def test_the_micro_batch_is_the_largest_that_fits_by_the_estimate() -> None:
    overrides = ["job.nodes=1", "job.ntasks_per_node=1", "training.seq_length=4096"]
    config = resolve.require_native(
        resolve.load_run_config(places.shared_file("configs/runs/llama3-1b.yaml"), overrides)
    )
    memory, vocabulary = 150_000_000_000, CheckSetup(folder="", tiny=False).sizes.vocabulary

    def estimate(micro_batch: int) -> float:
        training = config.training.model_copy(update={"micro_batch_size": micro_batch})
        return memory_bytes(config.model_copy(update={"training": training}), vocabulary).total

    found = estimated_micro_batch(config, vocabulary, memory)
    assert estimate(found) <= 0.9 * memory < estimate(2 * found)
    assert estimated_micro_batch(config, vocabulary, None) == 1
    assert estimated_micro_batch(config, vocabulary, 10**9) == 1


def test_a_run_that_needs_more_than_the_estimate_trains_with_half_the_batch(tmp_path: Path, monkeypatch: Any) -> None:
    asked = []

    def train_until(setup: CheckSetup, name: str, sections: Any, *, steps: int) -> Run:
        asked.append(sections["training"]["micro_batch_size"])
        raise CheckFailed("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(runs, "train_until", train_until)
    monkeypatch.setattr(performance, "estimated_micro_batch", lambda *given: 4)
    setup = CheckSetup(folder=str(tmp_path), tiny=True)
    with pytest.raises(CheckFailed, match="ALLOC_FAILED"):
        performance.measure_speed(setup, PartFigures(tmp_path / "figures.json"))
    assert asked == [4, 2, 1]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_function_of_every_part_is_there(part: CheckPart) -> None:
    module, _, name = part.function.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
