"""A published launcher with its sizes shrunk trains on CPUs: RELAYRUN_LAUNCHERS_DIR names a folder with launchers."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.config.compose.yaml_file import dump_yaml
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.trainers.megatron_lm_log import MegatronDialect
from relayrun.files import read_json_lines
from relayrun.submit.adopt import adopt
from tests.checkouts import ON_CPUS, VOCABULARY, checkout_of, config, make_shard
from tests.waiting import wait_for
from tests.workspace import steps

from .test_local_megatron import job_pid, rank_pids, reached

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3000)]

LAUNCHER = "submit_apertus_8b.sh"
SIZES: dict[str, Any] = {
    "num-layers": 2,
    "hidden-size": 32,
    "ffn-hidden-size": 64,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "seq-length": 64,
    "max-position-embeddings": 64,
    "micro-batch-size": 1,
    "global-batch-size": 4,
    "rampup-batch-size": [2, 2, 16],
    "train-samples": 84,
    "lr-decay-samples": 84,
    "lr-warmup-samples": 8,
    "lr-wsd-decay-samples": 24,
    "ademamix-beta3-warmup": 20,
    "ademamix-alpha-warmup": 20,
    "save-interval": 5,  # none of the ramp's borders, at which Megatron-LM saves too, and then not twice
    "num-workers": 0,
}
"""The ramp's eight iterations have two samples each, later ones four: 84 are 25 iterations."""
NOT_ON_CPUS = dict.fromkeys(("qknorm-impl", "use-distributed-optimizer", "overlap-param-gather", "async-save"), False)
"""Flags that this checkout takes with TransformerEngine or CUDA alone; its distributed optimizer needs a fused
AdEMAMix."""
PHASE = 44
"""Samples of the first phase of data: 15 iterations."""


def shrunk(folder: Path, launcher: Path, checkout: Path) -> dict[str, Any]:
    """The settings that `relayrun adopt` makes of a launcher, with other sizes, for two ranks on CPUs."""
    text = launcher.read_text().replace("CHANGE_THIS", str(folder / "site"))
    (folder / launcher.name).write_text(text)
    found = adopt(folder / launcher.name, {"USER": "ada"}, site="local", checkout=str(checkout))
    assert found.errors == []
    settings = found.settings
    on_cpus = {name: value or True for name, value in re.findall(r"--(\S+)(?: ([a-z]\S*))?", " ".join(ON_CPUS.split()))}
    tokenizer = {"tokenizer-type": "NullTokenizer", "tokenizer-model": False, "vocab-size": VOCABULARY + 5}
    settings["megatron_lm"]["args"] |= SIZES | on_cpus | tokenizer | NOT_ON_CPUS
    settings["data"] = {"tokenizer": "none", "datasets": [str(folder / "data")]}
    settings["job"] = {"time": "30", "nodes": 1, "ntasks_per_node": 2}
    config(folder, checkout)  # the Python with stand-ins for CUDA
    settings["cluster"] = {"name": "local", "scheduler": "local", "python": str(folder / "python")}
    return settings


def write(folder: Path, name: str, settings: dict[str, Any], *, slow: str = "", load: str = "", **args: Any) -> Path:
    """Write a run config; `load`: where its first attempt goes on. `slow`: as MEGATRON_ON_CPU_SLOW."""
    own = settings["megatron_lm"]
    changed = settings | {"name": name, "run_dir": str(folder / name / "run")}
    changed["megatron_lm"] = own | {"args": own["args"] | {key.replace("_", "-"): value for key, value in args.items()}}
    if load:
        changed["checkpoint"] = {"interval": 5, "load": load}
        changed["data"] = settings["data"] | {"datasets": [str(folder / "second")]}
    changed["cluster"] = settings["cluster"] | {"environment": {"MEGATRON_ON_CPU_SLOW": slow} if slow else {}}
    path = folder / f"{name}.yaml"
    path.write_text(dump_yaml(changed))
    return path


def submit(path: Path, kill: Callable[[Run], None] = lambda run: None) -> Run:
    """Submit a config, and wait for the end of its chain; `kill` disturbs it meanwhile."""
    run = Run(path.with_suffix("") / "run")
    chain = threading.Thread(target=main, args=(["submit", str(path)],))
    chain.start()
    kill(run)
    chain.join(900)
    assert stop_reason(run) is not None
    return run


def kill_a_rank(run: Run) -> None:
    wait_for(lambda: run.attempt(1).metrics.exists() and reached(run, 10), 300)
    os.kill(rank_pids(run)[1], signal.SIGKILL)


def ask_the_job(run: Run) -> None:
    wait_for(lambda: run.attempt(1).metrics.exists() and reached(run, 18), 300)
    os.kill(job_pid(run), signal.SIGUSR2)


@pytest.mark.skipif("RELAYRUN_LAUNCHERS_DIR" not in os.environ, reason="RELAYRUN_LAUNCHERS_DIR names no launchers")
def test_a_shrunk_launcher_trains_through_kills_and_a_phase_of_data(tmp_path: Path) -> None:
    """AdEMAMix, xIELU, goldfish loss, a ramp of the batch size, a length in samples: as the launcher says them."""
    checkout = checkout_of(MegatronDialect.SWISS_AI)
    (launcher,) = Path(os.environ["RELAYRUN_LAUNCHERS_DIR"]).rglob(LAUNCHER)
    settings = shrunk(tmp_path, launcher, checkout)
    make_shard(tmp_path / "second", seed=2)
    found: dict[str, dict[int, tuple[str, str]]] = {}
    for name, kills, slow in (("whole", (), ""), ("cut", (kill_a_rank, ask_the_job), "9:1")):
        first = submit(write(tmp_path, f"{name}-1", settings, slow=slow, train_samples=PHASE), *kills[:1])
        slow = slow and "2:2"
        load = f"{first.checkpoints}:15"
        second = submit(write(tmp_path, f"{name}-2", settings, slow=slow, load=load, seed=29), *kills[1:])
        found[name] = steps(first) | steps(second)
        lines = [*read_json_lines(first.metrics_view), *read_json_lines(second.metrics_view)]
        consumed = [line["consumed_samples"] for line in lines if "loss" in line]
        assert consumed == [*range(2, 18, 2), *range(20, 85, 4)]
        assert consumed[14] == PHASE
        assert [len(first.attempt_numbers()), len(second.attempt_numbers())] == ([2, 2] if kills else [1, 1])
    assert sorted(found["whole"]) == list(range(1, 26))
    assert found["cut"] == found["whole"]
