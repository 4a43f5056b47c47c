"""launchers/submit-megatron-*.sh start what the earlier system's launchers start, flag for flag.

And the native baselines, whose settings are said as flags here, are those of the earlier system.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import MegatronConfig, RunConfig
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.megatron_lm import MegatronTrainer
from relayrun.control.trainers.tools import nsys_command
from relayrun.submit import launcher_overrides
from relayrun.submit.megatron_lm import flags as megatron_lm_flags
from relayrun.submit.megatron_lm.command_line import command_line
from relayrun.submit.run_plan import stop_after
from relayrun.tokens.shards.shard import ShardWriter
from tests.megatron_lm import seed_launcher
from tests.megatron_lm.seed_launcher import EDITS, NODES
from tests.megatron_lm.stand_in import stand_in

ROOT = Path(__file__).resolve().parents[2]

Words = tuple[str, ...] | None
"""The words behind a flag; None: the flag is not there."""

Differences = dict[str, tuple[Words, Words]]
"""Flags that differ: the earlier launcher's words and ours."""
Compare = Callable[..., Differences]

SAID = "Megatron-LM's default, said: defaults differ between checkouts"
DIFFERENCES: dict[str, tuple[Words, Words, str]] = {
    "norm-epsilon": (None, ("1e-05",), SAID),
    "adam-eps": (None, ("1e-08",), SAID),
    "eval-interval": (None, ("1000",), "nothing is evaluated, but NVIDIA's core 0.16 divides by it, without a default"),
    "override-opt_param-scheduler": (None, (), "TRAINING_STEPS may be raised on a resume; without it that ends a job"),
}
"""Flags that differ in every run: the earlier launcher's words, ours, and why."""

READER = "relayrun's own reader"
NATIVE: dict[str, tuple[Words, Words, str]] = {
    "train-iters": (("500",), ("5000",), "a run of 12 hours, not of 20 minutes; TRAINING_STEPS sets it"),
    "tokenizer-model": (
        ("alehc/swissai-tokenizer",),
        ("meta-llama/Llama-3.1-8B",),
        "Llama 3's own, with which the parameters are as many as published; `data.tokenizer` takes any",
    ),
    "no-check-for-nan-in-loss-and-grad": (
        (),
        None,
        "loss and norm are on the host anyway; `training.on_nan` says what then",
    ),
    "dataloader-type": (("single",), None, READER),
    "num-workers": (("1",), None, READER),
    "num-dataset-builder-threads": (("1",), None, READER),
    "no-log-loss-scale-to-tensorboard": ((), None, "bf16 has no loss scale"),
    "log-memory-to-tensorboard": ((), None, "always: memory is part of every line of metrics.jsonl"),
}
"""Flags that differ natively besides DIFFERENCES."""

OF_8B: dict[str, tuple[Words, Words, str]] = {"context-parallel-size": (None, ("1",), SAID)}
PROFILED: dict[str, tuple[Words, Words, str]] = {
    "profile-step-start": (None, ("10",), SAID),
    "profile-step-end": (None, ("12",), SAID),
    "profile-ranks": (None, ("0",), SAID),
}


def our_words(
    size: str, folder: Path, environment: dict[str, str], *, native: bool = False
) -> tuple[list[str], dict[str, str], Run]:
    """What our launcher's run gives to each rank of attempt 1, its variables, and its run.

    `native`: what it would be with the settings of the native baseline.
    """
    config = ROOT / f"configs/runs/{'' if native else 'megatron-'}llama3-{size}.yaml"
    block = {name: value for name, value in environment.items() if not (native and name == "MEGATRON_LM_DIR")}
    overrides = launcher_overrides.environment_overrides(block, trainer=resolve.read_trainer(config))
    found = resolve.load_run_config(config, [*overrides, f"run_dir={folder / 'run'}"])
    if isinstance(found, RunConfig):
        values = found.model_dump(mode="json", exclude={"evaluation", "trainer"})
        said = {"trainer": "megatron-lm", "megatron_lm": {"dir": environment["MEGATRON_LM_DIR"]}}
        found = MegatronConfig.model_validate(values | said)
    assert isinstance(found, MegatronConfig)
    run = Run(Path(found.run_dir or ""))
    run.path.mkdir(exist_ok=True)  # W&B's names lie in it
    trainer = MegatronTrainer(run, command_line(found, run).settings)
    begin = AttemptStart(
        attempt=1,
        job_id="7",
        job_name="n",
        nodes="n1",
        config_revision=1,
        base_iteration=0,
        base_path=None,
        start_time=0.0,
        job_end_time=None,
        grace_period=1.0,
    )
    words = [*found.cluster.command_prefix, *trainer.command(begin)]
    return words, trainer.environment(begin), run


def flags(words: list[str]) -> dict[str, tuple[str, ...]]:
    """The flags behind the program."""
    program = next(number for number, word in enumerate(words) if word.endswith("/pretrain_gpt.py"))
    return {
        each.name: each.values
        for each in megatron_lm_flags.flags_from_words([(word, "") for word in words[program + 1 :]], where="")
    }


def differences(seed: dict[str, tuple[str, ...]], ours: dict[str, tuple[str, ...]]) -> Differences:
    """Flags with what stands behind them in both, where that is not the same; numbers count by their value."""
    return {
        name: (seed.get(name), ours.get(name))
        for name in sorted(seed | ours)
        if name not in seed or name not in ours or not megatron_lm_flags.are_same_values(seed[name], ours[name])
    }


def without_reasons(allowed: dict[str, tuple[Words, Words, str]]) -> Differences:
    return {name: (theirs, ours) for name, (theirs, ours, _) in allowed.items()}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with the two shards that the earlier launcher's stand-in finds."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("PREFIX_A", "PREFIX_B"):
        writer = ShardWriter(folder / name, np.uint16)
        writer.add(np.arange(10, dtype=np.uint16), [10])
        writer.finish()
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return stand_in(tmp_path / "checkout")


@pytest.fixture
def compared(tmp_path: Path, data: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)

    def compare(size: str, words: list[str], *, native: bool = False, **environment: str) -> Differences:
        block = {
            "MEGATRON_LM_DIR": str(checkout),
            "DATASETS": str(data),
            "DATASET_CACHE_DIR": "/cache",
            "PROJECT_NAME": "Megatron-Clariden",
            "EXP_NAME": f"llama3-{size}-{NODES[size]}-nodes",
            **environment,
        }
        ours, _, run = our_words(size, tmp_path, block, native=native)
        here = {
            "PREFIX_A": str(data / "PREFIX_A"),
            "PREFIX_B": str(data / "PREFIX_B"),
            "SITE/user/datasets/cache": "/cache",
        }
        seed = flags([here.get(word, word) for word in words])
        found = differences(seed, flags(ours))
        folder = f"SITE/user/Megatron-LM/logs/Meg-Runs/Megatron-Clariden/llama3-{size}-{NODES[size]}-nodes"
        places = {
            "save": (f"{folder}/checkpoints", run.checkpoints),
            "load": (f"{folder}/checkpoints", run.checkpoints),
            "tensorboard-dir": (f"{folder}/logging/tensorboard", run.tensorboard),
            # of the attempt's own: the program removes `save`, and touches `exit` when it is done
            "trigger-path": (f"{folder}/triggers", run.attempt(1).client),
        }
        for name, (theirs, our) in places.items():
            assert found.pop(name) == ((theirs,), (str(our),))
        return found

    return compare


def allowed(size: str) -> Differences:
    return without_reasons(DIFFERENCES | (OF_8B if size == "8b" else {}))


@pytest.mark.parametrize("size", NODES)
@pytest.mark.parametrize("edited", ["as it stands", "sizes"])
def test_the_same_flags_but_for_those_listed(size: str, edited: str, compared: Compare) -> None:
    found = compared(size, seed_launcher.stored(size)[edited], **EDITS[edited])
    for name, (theirs, ours) in found.items():
        print(f"--{name}: earlier {theirs}, here {ours}: {(DIFFERENCES | OF_8B).get(name, ('', '', 'NOT LISTED'))[2]}")
    assert found == allowed(size)


@pytest.mark.parametrize("size", NODES)
def test_the_native_baseline_is_the_same_flag_by_flag_but_for_those_listed(size: str, compared: Compare) -> None:
    found = compared(size, seed_launcher.stored(size)["as it stands"], native=True)
    listed = DIFFERENCES | NATIVE | (OF_8B if size == "8b" else {})
    for name, (theirs, ours) in found.items():
        print(f"--{name}: earlier {theirs}, here {ours}: {listed.get(name, ('', '', 'NOT LISTED'))[2]}")
    assert found == without_reasons(listed)


@pytest.mark.parametrize("size", NODES)
def test_mock_data(size: str, compared: Compare) -> None:
    found = compared(size, seed_launcher.stored(size)["MOCK_DATA"], MOCK_DATA="true", DATASET_CACHE_DIR="")
    assert found == allowed(size)


@pytest.mark.parametrize("size", NODES)
def test_nsys_stands_around_the_program_with_the_same_options(
    size: str, tmp_path: Path, data: Path, checkout: Path, compared: Compare
) -> None:
    words = seed_launcher.stored(size)["NSYS_PROFILER"]
    assert compared(size, words, NSYS_PROFILER="true") == allowed(size) | without_reasons(PROFILED)
    block = {"MEGATRON_LM_DIR": str(checkout), "DATASETS": str(data), "NSYS_PROFILER": "true"}
    ours, _, run = our_words(size, tmp_path, block)
    written_out = " ".join(words[2 : words.index("python3")])
    for short, long in (("-s none", "--sample=none"), ("--force-overwrite true", "--force-overwrite=true")):
        assert short in written_out
        written_out = written_out.replace(short, long)
    seed = written_out.split()
    output = next(word for word in seed if word.startswith("--output="))
    # nsys itself fills in the names of node and rank: no shell stands around it here
    name = "nsys-trace-hostname-%h-procid-%q{SLURM_PROCID}.nsys-rep"
    seed[seed.index(output)] = f"--output={run.debug_of(1)}/profile/{name}"
    assert ours[: len(seed)] == seed


def test_options_of_nsys_take_the_place_of_those_that_are_there(tmp_path: Path) -> None:
    usual = nsys_command(str(tmp_path))
    given = nsys_command(str(tmp_path), ["--trace=cuda", "--gpu-metrics-devices=all", "--force-overwrite=false"])
    assert "--trace=nvtx,cudnn,cublas,cuda" in usual
    left_out = {"--trace=nvtx,cudnn,cublas,cuda", "--force-overwrite=true"}
    kept = [word for word in usual if word not in left_out]
    assert given == [*kept, "--trace=cuda", "--gpu-metrics-devices=all", "--force-overwrite=false"]


def test_a_run_that_stops_early_keeps_its_train_iters(tmp_path: Path, data: Path, checkout: Path) -> None:
    config = ROOT / "configs/runs/megatron-llama3-8b.yaml"
    block = {"MEGATRON_LM_DIR": str(checkout), "DATASETS": str(data)}
    overrides = launcher_overrides.environment_overrides(block, trainer=resolve.read_trainer(config))
    found = resolve.load_run_config(config, [*overrides, f"run_dir={tmp_path / 'run'}", "training.stop_after=200"])
    assert isinstance(found, MegatronConfig)
    assert stop_after(found) == 200
    line = command_line(found, Run(tmp_path / "run"))
    flags = {name: line.merged.find(name) for name in ("exit-interval", "train-iters")}
    assert {name: each.values for name, each in flags.items() if each is not None} == {
        "exit-interval": ("200",),
        "train-iters": ("500",),
    }
    assert line.settings.total_steps == 500


@pytest.mark.parametrize("size", NODES)
def test_wandb_where_the_job_has_a_key(
    size: str, tmp_path: Path, compared: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = seed_launcher.stored(size)["W&B"]
    assert {"wandb-project", "wandb-exp-name", "wandb-save-dir"} <= compared(size, words).keys()
    monkeypatch.setenv("WANDB_API_KEY", "k")
    name = f"llama3-{size}-{NODES[size]}-nodes"
    folder = f"SITE/user/Megatron-LM/logs/Meg-Runs/Megatron-Clariden/{name}/logging"
    assert compared(size, words) == allowed(size) | {
        "wandb-exp-name": ((f"{name}-7",), (name,)),  # one run in W&B over all jobs, not one a job
        "wandb-save-dir": ((folder,), (str(tmp_path / "run"),)),
    }


@pytest.mark.parametrize("size", NODES)
def test_nccl_writes_a_file_of_each_process(
    size: str, tmp_path: Path, data: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    seed = dict(word.partition("=")[::2] for word in seed_launcher.stored(size)["LOG_NCCL"][2:4])
    assert list(seed) == ["NCCL_DEBUG", "NCCL_DEBUG_FILE"]
    block = {"MEGATRON_LM_DIR": str(checkout), "DATASETS": str(data), "LOG_NCCL": "true"}
    _, variables, run = our_words(size, tmp_path, block)
    # NCCL itself fills in node and process; the earlier one's file is named by node, local rank and rank
    assert {name: value for name, value in variables.items() if name.startswith("NCCL")} == {
        "NCCL_DEBUG": seed["NCCL_DEBUG"],
        "NCCL_DEBUG_FILE": f"{run.debug_of(1)}/nccl-info-hostname-%h-pid-%p.txt",
    }


@pytest.mark.skipif("MEGATRON_LM_DIR" not in os.environ, reason="needs MEGATRON_LM_DIR: a checkout of swiss-ai's fork")
@pytest.mark.parametrize("size", NODES)
def test_what_is_stored_is_what_the_launchers_of_the_checkout_start(size: str) -> None:
    checkout = Path(os.environ["MEGATRON_LM_DIR"])
    if not (checkout / f"submit-llama3-{size}.sh").is_file():
        pytest.skip(f"{checkout} has no launchers: it is not swiss-ai's fork")
    assert seed_launcher.every(checkout, size) == seed_launcher.stored(size)
