"""Training runs of the check: real chains of the local scheduler on this machine, submitted as a user submits them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayrun.config.compose import resolve, yaml_file
from relayrun.config.compose.schema import RunConfig
from relayrun.control.chain import failure_reason
from relayrun.control.rundir.records import AttemptOutcome
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.files import read_json_lines
from relayrun.lab.gpucheck.setup import CheckFailed, CheckSetup, last_log_line, log_tail
from relayrun.lab.small_run import (
    SEED,
    Sections,
    merge_sections,
    random_data,
    run_config_values,
    run_in,
    start_submit,
    write_config,
)

HOOKS_MODULE = "relayrun.lab.gpucheck.programs.hooks"


@dataclass(frozen=True, kw_only=True)
class LocalChain:
    """A run whose jobs one child process runs, one after the other."""

    run: Run
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, steps: int) -> Run:
        """Wait for the end of the chain. Raises CheckFailed unless its last attempt is done with `steps` iterations."""
        self.process.wait()
        numbers = self.run.attempt_numbers()
        outcome = AttemptOutcome.read(self.run.attempt(numbers[-1]).outcome) if numbers else None
        if outcome is None or (outcome.outcome, outcome.iteration) != ("done", steps):
            raise CheckFailed(f"the training run {self.run.path.name} failed: {self.why()}", where=self.log)
        return self.run

    def why(self) -> str:
        """Return STOP and the newest failure of a rank in one line, and print the run's logs."""
        reason = stop_reason(self.run) if self.run.path.exists() else None
        attempts = [self.run.attempt(number) for number in self.run.attempt_numbers()]
        begins = [attempt.read_begin() for attempt in attempts[-1:]]
        for log in [self.log, *(Path(begin.log) for begin in begins if begin is not None and begin.log)]:
            print(log_tail(log), flush=True)  # goes into the part's log
        said = [failure.error for attempt in attempts for failure in failure_reason.read_failures(attempt)]
        return " ".join(("; ".join(filter(None, [reason, *said[-1:]])) or last_log_line(self.log)).split())[:1500]


def check_run_values(setup: CheckSetup, name: str, sections: Sections) -> dict[str, Any]:
    """Return the run config of a training run of the check: the common settings with these changes."""
    common: dict[str, dict[str, Any]] = {
        "data": {"tokenizer": "mock", "mock_data": True, "mock_vocabulary_size": setup.sizes.vocabulary},
        "training": {"precision": setup.precision, "seed": SEED, "hooks": []},
        "optimizer": {"lr": 1e-3, "lr_warmup_steps": 1},
        "checkpoint": {"interval": 1_000_000, "async_save": False},
        "parallel": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        "chain": {"auto_requeue": True, "max_failed_attempts": 1},
        "debug": {"memory_interval": 0},
        "job": {
            "time": "01:00:00",
            "ntasks_per_node": setup.ranks,
            "gpus_per_node": setup.gpus,
            "cpus_per_task": setup.cpus_per_rank,
        },
        "cluster": {"name": "gpu-check", **setup.cluster, "scheduler": "local"},
    }
    if not setup.gpus:
        common["training"]["threads"] = 1
    made = run_config_values(setup.path, "gpu-check", name, common, sections)
    made["training"]["hooks"] = [*setup.hooks, *made["training"]["hooks"]]
    return made


def start_run(setup: CheckSetup, name: str, sections: Sections) -> LocalChain:
    """Submit a training run; its jobs run beside this process."""
    file = write_config(setup.path, check_run_values(setup, name, sections))
    run, log = run_in(setup.path, name), setup.parts / f"{name}.log"
    shutil.rmtree(run.path, ignore_errors=True)
    with log.open("wb") as output:
        process = start_submit(file, setup.overrides, stdout=output, stderr=output)
    return LocalChain(run=run, process=process, log=log)


def checked_config(setup: CheckSetup, name: str, sections: Sections) -> RunConfig:
    """Return the config of a training run, checked as by a submit. Raises ConfigError."""
    return compose_values(setup, check_run_values(setup, name, sections))


def compose_values(setup: CheckSetup, made: Mapping[str, Any]) -> RunConfig:
    """Return the config of these values and the overrides. Raises ConfigError."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(yaml_file.dump_yaml(dict(made)))
        file.flush()
        return resolve.require_native(resolve.load_run_config(Path(file.name), setup.overrides))


def train_until(setup: CheckSetup, name: str, sections: Sections, *, steps: int) -> Run:
    """Train `steps` iterations and kill the run: a timed run needs no final save. Raises CheckFailed."""
    training = dict(sections["training"])
    hooks = [*training.get("hooks", []), cut_hook([{"signal": "SIGKILL", "iteration": steps}])]
    training |= {"steps": steps + 1, "hooks": hooks}
    chain = start_run(setup, name, {**sections, "training": training})
    chain.process.wait()
    lines = iteration_lines(chain.run, 1)
    if not lines or lines[-1]["iteration"] < steps:
        raise CheckFailed(f"the training run {name} failed: {chain.why()}", where=chain.log)
    return chain.run


def cut_hook(cuts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"hook": f"{HOOKS_MODULE}:SignalSelfHook", "options": {"cuts": list(cuts)}}


def small_run_sections(setup: CheckSetup, *, steps: int, ranks: int, batches: int = 1) -> dict[str, dict[str, Any]]:
    """Return the sections of a run of the small model. `batches`: micro-batches of an iteration on each rank."""
    sizes = setup.sizes
    return {
        "model": dict(sizes.resumed_model),
        "training": {
            "steps": steps,
            "micro_batch_size": sizes.resumed_batch,
            "global_batch_size": batches * sizes.resumed_batch * ranks,
            "seq_length": sizes.resumed_seq_length,
        },
    }


def recorded_run_sections(setup: CheckSetup, *, cuts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sections of a small deterministic run that records digests of every iteration, and interrupts itself.
    `cuts`: see `programs.hooks.SignalSelfHook`."""
    changes: dict[str, dict[str, Any]] = {
        "data": data_with_tokenizer(setup),
        "training": {"deterministic": True, "hooks": [f"{HOOKS_MODULE}:DigestHook", cut_hook(cuts)]},
        "checkpoint": {"interval": setup.sizes.interval, "keep_last": 1},
    }
    small = small_run_sections(setup, steps=setup.sizes.steps, ranks=setup.ranks, batches=2)
    return merge_sections(small, changes)


def data_with_tokenizer(setup: CheckSetup) -> dict[str, Any]:
    """Return section `data` with random documents over a skewed vocabulary, and a tokenizer; written once."""
    sizes = setup.sizes
    return random_data(
        setup.path / "data", vocabulary=sizes.resumed_vocabulary, longest=4 * sizes.resumed_seq_length, documents=400
    )


def iteration_lines(run: Run, attempt: int) -> list[dict[str, Any]]:
    """Return the iterations in an attempt's metrics.jsonl."""
    return [line for line in read_json_lines(run.attempt(attempt).metrics) if "loss" in line]


def remove_checkpoints(run: Run) -> None:
    shutil.rmtree(run.checkpoints, ignore_errors=True)
