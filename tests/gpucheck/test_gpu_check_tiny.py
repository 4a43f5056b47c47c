"""`relayrun gpu-check --tiny`: the way of a check on a GPU, on CPUs; and what is planted, found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relayrun.config.compose import yaml_file
from relayrun.lab.gpucheck import report
from relayrun.lab.gpucheck.check import PARTS
from relayrun.lab.gpucheck.kernels import LAYOUT_VARIANTS, MODEL_VARIANTS
from tests import warm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PLANTED = "tests.gpucheck.planted"


def gpu_check(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run it in `folder`; return how it ended and its result. Its ranks need not import."""
    cluster = folder / "cluster.yaml"
    cluster.write_text(yaml_file.dump_yaml({"name": "here", "scheduler": "local", "python": warm.python()}))
    command = [sys.executable, "-m", "relayrun.cli", "gpu-check", "--tiny", f"--cluster={cluster}"]
    command += [f"--folder={folder / 'check'}", f"--output={folder / 'result.json'}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    result = folder / "result.json"
    return done, json.loads(result.read_text()) if result.exists() else {}


@pytest.mark.long
def test_the_whole_way_on_cpus(tmp_path: Path) -> None:
    every = [part.name for part in PARTS if part.name != "layouts"]  # of which a test of its own knows
    done, result = gpu_check(tmp_path, "--only", *every)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(part["name"], part["status"]) for part in result["parts"]] == [(name, "done") for name in every]
    table = report.check_rows(result)
    promised = {row.what: row.verdict for row in table if row.hard}
    not_here = [name for name, way in MODEL_VARIANTS.items() if "TransformerEngine" in way.what or "8 bits" in way.what]
    assert len(promised) == 3 + 2 + 1 + len(MODEL_VARIANTS) - len(not_here) + 1 + 5 + 1
    assert set(promised.values()) == {"met"}
    for row in table:
        assert row.what in done.stdout or len(row.what) > 50

    figures = {part["name"]: part["figures"] for part in result["parts"]}
    # a resume was one: it began behind something, and trained on
    for cut in figures["resume"]["resumed"].values():
        assert cut["resumed_at"] >= 2
        assert cut["iterations"] >= 2
    job, bits = figures["resume"]["job"], figures["resume"]["bits"]
    assert (job["attempts"], job["ranks"], bits["iterations"]) == (1, 1, 12)
    first, second = job["restarts"]
    assert (first["next_iteration"], first["iteration"] - first["next_iteration"]) == (5, first["steps_lost"])
    assert (second["iteration"], second["next_iteration"]) == (9, 9)  # killed before the update of the next one
    assert min(first["seconds"]["all"], second["seconds"]["all"]) > 0
    assert figures["speed"]["training"]["micro_batch_size"] == 1
    assert figures["speed"]["trace"]["longest"]
    assert (tmp_path / "check" / "trace.json.gz").stat().st_size == figures["speed"]["trace"]["file_bytes"]
    saves = figures["save"]["saves"]["saves"]
    assert len(saves) == 3
    assert all(save["stall_seconds"] > 0 for save in saves)
    kernels = figures["kernels"]["kernels"]
    assert "flash" in kernels["attention_whole"]["operations"][0]
    assert kernels["attention_packed"]["seconds"] > 0
    assert kernels["memory"]["bytes_per_second"] > 0
    assert kernels["adam"]["not_measured"] == "needs a GPU"
    for name in not_here:
        assert "TransformerEngine is not installed" in kernels[name]["not_measured"]
    assert kernels["experts"]["first_loss"] != kernels["llama"]["first_loss"]
    assert not list((tmp_path / "check").rglob("*.distcp")), "checkpoints are removed"
    assert str(tmp_path) not in json.dumps(result)
    assert str(ROOT) not in json.dumps(result)


@pytest.mark.long
def test_every_layout_of_two_ranks_learns(tmp_path: Path) -> None:
    done, result = gpu_check(tmp_path, "--only", "layouts")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = result["parts"][1]["figures"]
    assert figures.keys() == LAYOUT_VARIANTS.keys()
    assert "TransformerEngine is not installed" in figures.pop("overlap")["not_measured"]
    assert {row.verdict for row in report.check_rows(result) if row.part == "layouts"} == {"met"}
    plain = figures["tensor"]
    for name in ("pipeline", "instances"):  # the same weights, and on CPUs the same ones in the beginning
        assert figures[name]["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-3)
    assert figures["experts"]["exact_loss"] == pytest.approx(figures["whole_experts"]["exact_loss"], rel=0.05)


def test_resumes_and_restarts_that_are_not_exact_are_found_and_named(tmp_path: Path) -> None:
    done, result = gpu_check(tmp_path, "--only", "resume", f"--hook={PLANTED}:FlipsABit")
    assert done.returncode == 1, done.stdout + done.stderr
    assert [part["name"] for part in result["parts"]] == ["environment", "resume"]
    failed = [row for row in report.check_rows(result) if row.fails]
    cuts = [f"resume after {cut}" for cut in ("SIGUSR2", "SIGKILL", "asynchronous save")]
    assert [row.what for row in failed] == [*cuts, "losses, gradient norms, states and weights after that"]
    for row in failed:
        assert row.value.startswith("differs: "), row.value
        assert f"FAILED: resume: {row.what}: {row.value}" in done.stdout
    assert failed[-1].value == "differs: optimizer state as loaded, of iteration 5"


@pytest.mark.long
def test_a_job_that_its_ranks_have_left_is_found_although_every_bit_is_right(tmp_path: Path) -> None:
    done, result = gpu_check(tmp_path, "--only", "resume", f"--hook={PLANTED}:LeavesItsJob")
    assert done.returncode == 1, done.stdout + done.stderr
    table = [row for row in report.check_rows(result) if row.part == "resume"]
    assert [row.what for row in table if row.fails] == ["a rank killed twice, training goes on inside its job"]
    assert next(row.value for row in table if row.fails).startswith("2 attempts of 1 rank, 1 new restart")
    assert {row.value for row in table if row.target == "bit for bit"} == {"bit for bit"}


@pytest.mark.long
def test_a_save_that_holds_training_is_found(tmp_path: Path) -> None:
    done, result = gpu_check(tmp_path, "--only", "save", f"--hook={PLANTED}:HoldsUpSavesTenSeconds")
    assert done.returncode == 1, done.stdout + done.stderr
    (failed,) = [row for row in report.check_rows(result) if row.fails]
    assert (failed.part, failed.verdict) == ("save", "missed")
    assert failed.what.startswith("what a save of 0.00")
    saves = result["parts"][1]["figures"]["saves"]["saves"]
    assert saves[0]["stall_seconds"] < 10 <= min(saves[1]["stall_seconds"], saves[2]["stall_seconds"])


@pytest.mark.long
def test_a_training_run_that_fails_says_why_and_the_rest_is_measured(tmp_path: Path) -> None:
    """Both parts train: the kernels before their export. What was measured before it stands in the result."""
    hook = "tests.training.user_hooks:Breaks"
    done, result = gpu_check(tmp_path, "--only", "save", "kernels", f"--hook={hook}")
    assert done.returncode == 1, done.stdout + done.stderr
    status = {part["name"]: part["status"] for part in result["parts"]}
    assert status == {"environment": "done", "save": "failed", "kernels": "failed"}
    parts = {part["name"]: part for part in result["parts"]}
    for name, failed in (("save", "save"), ("kernels", "the training run export failed")):
        assert failed in parts[name]["words"]
        assert f"hook {hook}" in parts[name]["words"]
    assert parts["kernels"]["figures"]["kernels"]["attention_whole"]["seconds"] > 0
    assert parts["save"]["figures"]["disk"]


def test_a_wrong_setting_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done, result = gpu_check(tmp_path, "--set=training.mikro_batch_size=3")
    assert done.returncode == 1
    assert "did you mean 'micro_batch_size'?" in done.stderr
    assert result == {}
    assert not (tmp_path / "check" / "parts").exists()


@pytest.mark.long
def test_the_attention_of_documents_is_asked_for_as_each_version_of_torch_wants_it() -> None:
    """In a process of its own: the program imports megatron-core."""
    code = """if True:
        import inspect
        from torch.nn.attention.varlen import varlen_attn
        from relayrun.train.model.attention import varlen_options
        print(varlen_options(inspect.signature(varlen_attn).parameters, grouped=True))
        print(varlen_options(["query", "is_causal", "return_aux"], grouped=True))
        print(varlen_options(["query", "window_size", "enable_gqa"], grouped=False))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.splitlines() == [
        "({'window_size': (-1, 0), 'enable_gqa': True}, True)",
        "({'is_causal': True}, False)",
        "({'window_size': (-1, 0)}, True)",
    ], done.stderr
