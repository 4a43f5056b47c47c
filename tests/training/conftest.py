"""Runs of the real training program: two ranks over gloo, a tiny Llama, random tokens."""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir import triggers
from relayrun.control.rundir.attempt import Attempt as AttemptDir
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.records import AttemptOutcome, AttemptStart, CheckpointCommit, Heartbeat, RankFailure
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local_srun import free_port
from relayrun.files import read_json_lines
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.shards.shard import ShardWriter
from tests import warm
from tests.waiting import wait_for

VOCABULARY = 300
RANKS = 2
FAULTS = "relayrun.lab.faults.injection:FaultInjectionHook"
Rank = subprocess.Popen[bytes] | warm.Warm
STARTED: list[Rank] = []
"""Ranks of the test that runs."""


def write_shards(folder: Path, *, shards: int, documents: int, seed: int) -> list[str]:
    """Documents of random length over a skewed vocabulary."""
    generator = np.random.default_rng(seed)
    prefixes = []
    for number in range(shards):
        lengths = generator.integers(20, 400, documents)
        ids = np.minimum(generator.geometric(0.03, lengths.sum()), VOCABULARY - 1)
        prefix = str(folder / f"shard{number}")
        writer = ShardWriter(prefix, np.uint16)
        writer.add(ids, lengths)
        writer.finish()
        prefixes.append(prefix)
    return prefixes


def prepare_rank(file_limit: int | None) -> None:
    """In the child, before Python starts anew."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))


def start_rank(
    command: Sequence[str], environment: dict[str, str], output: int, file_limit: int | None, *, imported: bool
) -> Rank:
    if imported:
        limits = {} if file_limit is None else {resource.RLIMIT_FSIZE: (file_limit, file_limit)}
        ignored = (signal.SIGUSR1, signal.SIGUSR2)
        return warm.start(command, stdout=output, stderr=output, env=environment, ignored=ignored, limits=limits)
    return subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT, preexec_fn=partial(prepare_rank, file_limit)
    )


@dataclass
class Attempt:
    """Ranks of one attempt that are running or have ended."""

    directory: AttemptDir
    processes: list[Rank]
    log: Path

    def wait(self, timeout: float = 600) -> list[int]:
        """Exit codes of the ranks. Fails the test, and ends them, if they take too long."""
        end = time.monotonic() + timeout
        try:
            return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            pytest.fail(f"the ranks hang:\n{self.output()}")
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def wait_for_iteration(self, iteration: int, timeout: float = 600) -> None:
        def reached() -> bool:
            there = any(line["iteration"] >= iteration for line in read_json_lines(self.directory.metrics))
            assert there or any(process.poll() is None for process in self.processes), missed()
            return there

        def missed() -> str:
            return f"iteration {iteration} was not reached:\n{self.output()}"

        wait_for(reached, timeout, step=0.01, words=missed)

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    def output(self) -> str:
        return self.log.read_text()

    @property
    def outcome(self) -> AttemptOutcome | None:
        return AttemptOutcome.read(self.directory.outcome)

    @property
    def commits(self) -> list[CheckpointCommit]:
        return self.directory.read_commits()

    def heartbeats(self) -> list[Heartbeat]:
        found = [Heartbeat.read(path) for path in sorted(self.directory.heartbeats.glob("*.json"))]
        return [beat for beat in found if beat is not None]

    def failures(self) -> list[RankFailure]:
        found = [RankFailure.read(path) for path in sorted(self.directory.failures.glob("*.json"))]
        return [failure for failure in found if failure is not None]

    def steps(self) -> dict[int, dict[str, Any]]:
        return {line["iteration"]: line for line in read_json_lines(self.directory.metrics) if "loss" in line}

    def evaluations(self) -> dict[int, dict[str, float]]:
        return {
            line["iteration"]: line["validation"]
            for line in read_json_lines(self.directory.metrics)
            if "validation" in line
        }


@dataclass
class Harness:
    """A run directory, and the supervisor's part of it."""

    run: Run
    config: dict[str, Any]
    revision: int = 1
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        ranks: int = self.config["job"]["ntasks_per_node"]
        return ranks

    def write_config(self, inject: str = "") -> None:
        """Write this revision, with faults of the drill."""
        values = copy.deepcopy(self.config)
        if inject:
            values["training"].setdefault("hooks", []).append({"hook": FAULTS, "options": {"faults": inject}})
        config = RunConfig.model_validate_json(json.dumps(values))
        self.run.config_revision(self.revision).write_text(yaml.safe_dump(config.model_dump(mode="json")))

    def begin(self, **changes: Any) -> AttemptDir:
        """Open the next attempt from what is durable."""
        base = resume_point(self.run)
        number = max(self.run.attempt_numbers(), default=0) + 1
        attempt = self.run.attempt(number)
        attempt.path.mkdir(parents=True)
        values: dict[str, Any] = {
            "attempt": number,
            "job_id": str(number),
            "job_name": "test",
            "nodes": "localhost",
            "config_revision": self.revision,
            "base_iteration": base.iteration,
            "base_path": base.path,
            "start_time": time.time(),
            "job_end_time": None,
            "grace_period": 0.0,
        }
        AttemptStart(**(values | changes)).write(attempt.begin)
        attempt.make_secret()
        return attempt

    def start(
        self,
        attempt: AttemptDir | None = None,
        *,
        file_limit: int | None = None,
        inject: str = "",
        prefix: Sequence[str] = (),
        imported: bool = True,
        **changes: Any,
    ) -> Attempt:
        """Start the ranks, SIGUSR2 ignored, as the launchers do. Rank 1 can write no file above `file_limit` bytes.

        `inject`: faults of `relayrun.lab.faults.injection`, of this attempt alone. `prefix`: put before the program.
        `imported`: from a process that has done the imports, see tests/warm.
        """
        attempt = attempt or self.begin(**changes)
        log = attempt.path / "log"
        port = free_port()
        self.write_config(inject)
        processes: list[Rank] = []
        for rank in range(self.ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            limit = file_limit if rank == 1 else None
            command = [
                *prefix,
                sys.executable,
                "-m",
                "relayrun.train",
                f"--run-dir={self.run.path}",
                f"--attempt={attempt.number}",
            ]
            with log.open("ab") as output:
                processes.append(start_rank(command, environment, output.fileno(), limit, imported=imported))
        STARTED.extend(processes)
        started = Attempt(attempt, processes, log)
        self.attempts.append(started)
        return started

    def train(self, **changes: Any) -> Attempt:
        """Run an attempt to its end, which must be a good one."""
        attempt = self.start(**changes)
        assert attempt.wait() == [0] * self.ranks, attempt.output()
        return attempt


@pytest.fixture(autouse=True)
def _no_rank_outlives_its_test() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Harness]:
    """`harness(section={name: value})` makes a run with these settings changed; the data are shared."""
    data = tmp_path_factory.mktemp("data")
    manifest = Manifest.build(
        {"train": write_shards(data / "train", shards=3, documents=40, seed=1)},
        {"held-out": write_shards(data / "held-out", shards=1, documents=12, seed=2)},
        vocabulary_size=VOCABULARY,
        eod=0,
        tokenizer="none",
    )

    def make(**sections: dict[str, Any]) -> Harness:
        run = Run(tmp_path_factory.mktemp("run"))
        for folder in (run.config, run.attempts, run.checkpoints):
            folder.mkdir()
        triggers.create_trigger_folder(run)
        manifest.write(run.manifest)
        config: dict[str, Any] = {
            "project": "tests",
            "name": "tiny",
            "model": {
                "num_layers": 2,
                "hidden_size": 64,
                "ffn_hidden_size": 128,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "hidden_dropout": 0.1,
                "attention_dropout": 0.1,
            },
            "data": {"tokenizer": "none", "datasets": ["none"]},
            "training": {"steps": 20, "micro_batch_size": 2, "global_batch_size": 8, "seq_length": 64, "threads": 1},
            "optimizer": {"lr": 1e-3, "lr_warmup_steps": 2},
            "checkpoint": {"interval": 1000},
            "job": {"time": "10", "ntasks_per_node": RANKS},
            "cluster": {"name": "test", "scheduler": "local"},
        }
        for name, changes in sections.items():
            config[name] = config.get(name, {}) | changes
        made = Harness(run, config)
        made.write_config()
        return made

    return make


@pytest.fixture(scope="session")
def trained(harness: Callable[..., Harness]) -> Harness:
    """Twelve iterations, saved at 4, 8 and 12; the generators draw for dropout. For tests that copy the directory."""
    made = harness(
        training={"steps": 12},
        checkpoint={"interval": 4, "keep_last": 10},
        parallel={"use_distributed_optimizer": True},
    )
    made.train()
    return made
