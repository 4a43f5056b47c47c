"""The table of a check: what is met, what is missed, and what makes the check fail."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from relayrun.lab.gpucheck import report
from relayrun.lab.gpucheck.report import CheckRow

CUTS = ("SIGUSR2", "SIGKILL", "asynchronous save")


def resumed(**changes: Any) -> dict[str, Any]:
    return {"resumed_at": 8, "iterations": 16, "equal": True, "differed_before": None, "difference": None} | changes


def failed_restart(**changes: Any) -> dict[str, Any]:
    return {
        "words": "killed by SIGKILL",
        "again": True,
        "source": "memory",
        "steps_lost": 1,
        "seconds": {"end": 0.1, "all": 4.0},
    } | changes


TRAINING = {
    "precision": "bf16",
    "micro_batch_size": 8,
    "seq_length": 4096,
    "mfu": 0.56,
    "step_seconds": 2.0,
    "tokens_per_second_per_gpu": 60_000.0,
    "tokens_per_second": 60_000.0,
}
SAVE = {"stall_seconds": 0.5, "durable_after_seconds": 12.0}
PARTS: dict[str, dict[str, Any]] = {
    "resume": {
        "resumed": {cut: resumed() for cut in CUTS},
        "job": {
            "attempts": 1,
            "kills": 2,
            "ranks": 4,
            "restarts": [failed_restart(), failed_restart(steps_lost=0, seconds={"end": 0.1, "all": 5.0})],
        },
        "bits": {"iterations": 24, "equal": True, "difference": None},
    },
    "speed": {"training": TRAINING},
    "save": {
        "saves": {
            "bytes": 17_300_000_000,
            "layers": 16,
            "layers_of_the_model": 16,
            "saves": [SAVE | {"stall_seconds": 3.0}, SAVE, SAVE],
        },
        "copy": {"seconds_of_a_save": 0.35},
    },
    "kernels": {
        "kernels": {
            "adam": {"what": "AdamW in one kernel", "words": "equal but for rounding"},
            "compiler": {"what": "a kernel by torch.compile", "not_measured": "needs a GPU"},
            "muon": {
                "what": "Muon",
                "first_loss": 8.0,
                "last_loss": 4.0,
                "exact_loss": 4.05,
                "tokens_per_second": 1e6,
                "peak_bytes": 10**9,
            },
            "fp8": {"what": "fp8", "not_measured": "TransformerEngine is not installed"},
        },
        "export": {"difference": 1e-7, "largest": 4.0, "tokens": 512, "equal": True},
    },
}


def result(**changes: Any) -> dict[str, Any]:
    """Make a result of one H200; `changes`: figures of a part, by its name."""
    figures = copy.deepcopy(PARTS) | changes
    parts = [{"name": name, "status": "done", "words": None, "figures": found} for name, found in figures.items()]
    return {"device": "NVIDIA H200", "gpus": 1, "stall_allowance": 0.0, "parts": parts}


def row(table: list[CheckRow], what: str) -> CheckRow:
    (found,) = [row for row in table if what in row.what]
    return found


def test_where_all_is_well_nothing_fails() -> None:
    table = report.check_rows(result())
    assert report.check_exit_code(table) == 0
    assert row(table, "MFU").verdict == "met"
    assert row(table, "MFU").value == "56.0%"
    assert row(table, "a save of 17.3 GB holds up").value == "0.5 s, 1.43 x the copy (0.35 s)"
    assert [row.value for row in table if row.part == "resume"] == [
        *["bit for bit"] * 3,
        "1 attempt of 4 ranks, 2 new restarts",
        "memory, memory; 1, 0 steps lost",
        "bit for bit",
        "median 4.5 s, largest 5 s",
    ]
    assert [row.verdict for row in table if row.part == "resume"] == ["met"] * 6 + [""]
    assert row(table, "AdamW").verdict == "met"
    assert row(table, "torch.compile").value == "not measured: needs a GPU"


@pytest.mark.parametrize("cut", CUTS)
def test_a_resume_that_differs_fails_and_is_named(cut: str) -> None:
    figures = copy.deepcopy(PARTS["resume"])
    figures["resumed"][cut] = resumed(equal=False, difference="loss of iteration 9: 5.2, not 5.1")
    table = report.check_rows(result(resume=figures))
    (failed,) = [row for row in table if row.fails]
    assert failed.what == f"resume after {cut}"
    assert failed.value == "differs: loss of iteration 9: 5.2, not 5.1"
    assert report.check_exit_code(table) == 1


KILLED = failed_restart(steps_lost=0)


@pytest.mark.parametrize(
    ("job", "missed"),
    [
        ({"attempts": 2}, {"2 attempts of 4 ranks, 2 new restarts (killed by SIGKILL)"}),
        ({"restarts": [KILLED]}, {"1 attempt of 4 ranks, 1 new restart (killed by SIGKILL)"}),
        ({"restarts": []}, {"1 attempt of 4 ranks, 0 new restarts", ""}),
        (
            {"restarts": [KILLED, failed_restart(words="OutOfMemoryError: CUDA out of memory"), KILLED]},
            {"1 attempt of 4 ranks, 3 new restarts (killed by SIGKILL; OutOfMemoryError: CUDA out of memory)"},
        ),
        (
            {"restarts": [KILLED, failed_restart(again=False, seconds={"end": 0.1})]},
            {"1 attempt of 4 ranks, 1 new restart (killed by SIGKILL)"},
        ),
        ({"restarts": [KILLED, failed_restart(source="disk")]}, {"memory, disk; 0, 1 steps lost"}),
        ({"restarts": [KILLED, failed_restart(steps_lost=2)]}, {"memory, memory; 0, 2 steps lost"}),
    ],
)
def test_restarts_that_are_not_as_promised_fail_and_say_how_it_was(job: dict[str, Any], missed: set[str]) -> None:
    figures = copy.deepcopy(PARTS["resume"])
    figures["job"] |= job
    table = report.check_rows(result(resume=figures))
    assert {row.value for row in table if row.fails} == missed
    assert report.check_exit_code(table) == 1


def test_restarts_that_differ_or_were_not_compared_fail() -> None:
    differs = {"iterations": 24, "equal": False, "difference": "loss of iteration 9: 5.2, not 5.1"}
    table = report.check_rows(result(resume=PARTS["resume"] | {"bits": differs}))
    assert [row.value for row in table if row.fails] == ["differs: loss of iteration 9: 5.2, not 5.1"]
    table = report.check_rows(result(resume={name: PARTS["resume"][name] for name in ("resumed", "job")}))
    assert [(row.verdict, row.target) for row in table if row.fails] == [("not measured", "bit for bit")]


@pytest.mark.parametrize(("stall", "verdict", "code"), [(0.52, "met", 0), (0.53, "missed", 1)])
def test_a_save_may_hold_training_as_long_as_a_copy_and_a_half(stall: float, verdict: str, code: int) -> None:
    figures = copy.deepcopy(PARTS["save"])
    for save in figures["saves"]["saves"][1:]:
        save["stall_seconds"] = stall
    table = report.check_rows(result(save=figures))
    assert row(table, "a save of 17.3 GB").verdict == verdict
    assert report.check_exit_code(table) == code


def test_an_mfu_below_its_target_is_missed_and_no_broken_promise() -> None:
    table = report.check_rows(result(speed={"training": TRAINING | {"mfu": 0.49}}))
    assert (row(table, "MFU").value, row(table, "MFU").verdict) == ("49.0%", "missed")
    assert report.check_exit_code(table) == 0


def test_a_part_without_time_fails_only_by_what_it_was_to_prove() -> None:
    for name, code in (("resume", 1), ("save", 1), ("kernels", 1), ("speed", 0)):
        made = result()
        for part in made["parts"]:
            if part["name"] == name:
                part.update(status="skipped", words="the check was interrupted", figures={})
        table = report.check_rows(made)
        assert row([each for each in table if each.part == name], "the part").value.startswith("skipped: the check")
        assert report.check_exit_code(table) == code, name


def test_a_part_that_failed_keeps_what_it_had_measured() -> None:
    made = result()
    part = next(part for part in made["parts"] if part["name"] == "save")
    part.update(status="timeout", words="was ended after 180 s", figures=PARTS["save"])
    table = [row for row in report.check_rows(made) if row.part == "save"]
    assert table[0].value == "timeout: was ended after 180 s"
    assert row(table, "a save of 17.3 GB").verdict == "met"
    assert report.check_exit_code(table) == 1


def kernels(**changes: Any) -> dict[str, Any]:
    """Make the figures of `kernels` with other rows; `export` replaces that of the export."""
    export = changes.pop("export", PARTS["kernels"]["export"])
    return {"kernels": PARTS["kernels"]["kernels"] | changes, "export": export}


def test_an_export_that_differs_fails() -> None:
    changed = kernels(export=PARTS["kernels"]["export"] | {"difference": 0.01})
    assert report.check_exit_code(report.check_rows(result(kernels=changed))) == 1


@pytest.mark.parametrize(
    ("changes", "code"),
    [({}, 0), ({"last_loss": 7.7, "exact_loss": 7.7}, 1), ({"exact_loss": 4.1}, 1)],
)
def test_a_model_that_does_not_learn_or_computes_something_else_fails(changes: dict[str, Any], code: int) -> None:
    table = report.check_rows(result(kernels=kernels(muon=PARTS["kernels"]["kernels"]["muon"] | changes)))
    assert report.check_exit_code(table) == code


def test_a_kernel_that_fails_has_a_row_with_its_reason() -> None:
    table = report.check_rows(
        result(kernels=kernels(adam={"what": "AdamW in one kernel", "failed": "RuntimeError: x"}))
    )
    (failed,) = [row for row in table if row.fails]
    assert (failed.what, failed.value) == ("AdamW in one kernel", "failed: RuntimeError: x")


def test_what_a_model_needs_and_is_not_here_is_no_failure() -> None:
    table = report.check_rows(result())
    assert row(table, "fp8").value == "not measured: TransformerEngine is not installed"
    assert row(table, "Muon").value == "loss 8, then 4, 4.05 in fp32; 1,000,000 tokens/s, 1 GB"
