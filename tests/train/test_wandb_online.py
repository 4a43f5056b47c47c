"""The real W&B client, online, against a stand-in for the service on the loopback interface."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from relayrun.config.compose import resolve
from relayrun.control.rundir.records import AttemptOutcome
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.tracker_runs import update_tracker_runs
from relayrun.files import append_line
from relayrun.train.reporting.trackers import offline_wandb_files, wandb_history
from tests.history import began
from tests.waiting import wait_for
from tests.wandb_service import WandBService
from tests.workspace import Workspace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef0123456789abcdef01234567"


def attempt(run: Run, number: int, *, base: int, last: int, rolled_back: bool = False) -> None:
    """An attempt that computed the iterations base + 1 to last."""
    made = run.attempt(number)
    began(run, number, base=base, base_path=None, rolled_back=rolled_back, start_time=0.0)
    for iteration in range(base + 1, last + 1):
        append_line(made.metrics, {"iteration": iteration, "loss": float(number), "time": 1e9 + iteration})


def start_feed(run: Run, number: int, service: WandBService, *more: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": service.url}
    command = [
        sys.executable,
        "-m",
        "relayrun.train.reporting.tracker_feed",
        "wandb",
        f"--run-dir={run.path}",
        f"--attempt={number}",
        f"--parent={os.getpid()}",
        "--last-seconds=250",  # a busy machine needs more than training waits for
        *more,
    ]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, bufsize=0)


def leave(run: Run, number: int, feed: subprocess.Popen[bytes]) -> None:
    AttemptOutcome(outcome="saved", reason="", iteration=0, time=0.0).write(run.attempt(number).outcome)
    feed.communicate(b"\n", timeout=300)


def sync(run: Run, service: WandBService) -> str:
    environment = os.environ | {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": service.url}
    done = subprocess.run(
        [sys.executable, "scripts/tools/sync_wandb.py", str(run.path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for_step(service: WandBService, run_id: str, step: int) -> None:
    wait_for(
        lambda: any(row["_step"] >= step for row in service.history(run_id)),
        words=lambda: f"step {step} behind {service.history(run_id)[-1:]}",
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    workspace = Workspace.make(tmp_path)
    made = workspace.run("run")
    made.config.mkdir(parents=True)
    made.config_revision(1).write_text(resolve.dump_run_config(resolve.load_run_config(workspace.config("run"))))
    made.plan.write_text('{"format": 2}')
    return made


@pytest.mark.long
def test_a_killed_feed_a_resume_and_a_rollback(run: Run) -> None:
    with WandBService() as service:
        attempt(run, 1, base=0, last=30)
        (stream,) = update_tracker_runs(run)
        feed = start_feed(run, 1, service)
        wait_for_step(service, stream.id, 28)  # the feed holds the last step back, and so does the client
        for iteration in (31, 32, 33):
            append_line(run.attempt(1).metrics, {"iteration": iteration, "loss": 1.0, "time": 1e9})
        feed.kill()
        feed.communicate(timeout=300)

        attempt(run, 2, base=20, last=40)
        leave(run, 2, start_feed(run, 2, service))
        rows = service.history(stream.id)
        assert [row["_step"] for row in rows] == list(range(1, 41))
        assert [row["train/loss"] for row in rows[:20]] == [1.0] * 20
        assert [row["train/loss"] for row in rows[33:]] == [2.0] * 7
        inserted = service.buckets[stream.id]["inserted"]
        assert (inserted["project"], inserted["displayName"]) == ("tests", "tiny")

        attempt(run, 3, base=10, last=15, rolled_back=True)
        fork = update_tracker_runs(run)[-1]
        leave(run, 3, start_feed(run, 3, service))
        assert [(row["_step"], row["train/loss"]) for row in service.history(fork.id)] == [
            *((step, 1.0) for step in range(1, 11)),
            *((step, 3.0) for step in range(11, 16)),
        ]
        assert service.buckets[fork.id]["inserted"]["displayName"] == "tiny-from-10"
        assert len(service.history(stream.id)) == 40
        assert set(service.buckets) == {stream.id, fork.id}
    assert not [path for path in run.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.long
def test_a_client_whose_service_process_is_killed_is_replaced(run: Run) -> None:
    attempt(run, 1, base=0, last=30)
    with WandBService() as service:
        (stream,) = update_tracker_runs(run)
        feed = start_feed(run, 1, service, "--pause=0.5")
        wait_for_step(service, stream.id, 28)
        for child in psutil.Process(feed.pid).children():
            assert child.name() == "wandb-core"
            child.kill()
        for iteration in range(31, 51):
            append_line(run.attempt(1).metrics, {"iteration": iteration, "loss": 1.0, "time": 1e9})
        wait_for_step(service, stream.id, 48)
        leave(run, 1, feed)
        assert [row["_step"] for row in service.history(stream.id)] == list(range(1, 51))


@pytest.mark.long
def test_a_run_of_nodes_without_network_is_sent_from_where_there_is_one(run: Run) -> None:
    attempt(run, 1, base=0, last=25)
    attempt(run, 2, base=20, last=30)  # goes on
    with WandBService() as service:
        assert "the service had iteration 0, sent up to 29" in sync(run, service)
        (stream,) = update_tracker_runs(run)
        AttemptOutcome(outcome="done", reason="", iteration=30, time=0.0).write(run.attempt(2).outcome)
        assert "the service had iteration 29, sent up to 30" in sync(run, service)
        assert "the service had iteration 30, sent up to 30" in sync(run, service)
        rows = service.history(stream.id)
    assert [row["_step"] for row in rows] == list(range(1, 31))
    assert [row["train/loss"] for row in rows] == [1.0] * 20 + [2.0] * 10
    assert [row["_timestamp"] for row in rows] == [1e9 + step for step in range(1, 31)]


@pytest.mark.long
def test_a_full_disk_leaves_no_gap_in_the_offline_files(run: Run) -> None:
    """The client may write no file above 100 kB in the first attempt."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    steps = []
    for number, (base, last) in enumerate([(0, 2000), (1500, 2100)], start=1):
        attempt(run, number, base=base, last=last)
        (stream,) = update_tracker_runs(run)
        command = [
            sys.executable,
            "-m",
            "relayrun.train.reporting.tracker_feed",
            "wandb",
            f"--run-dir={run.path}",
            f"--attempt={number}",
            f"--parent={os.getpid()}",
        ]
        feed = subprocess.Popen(
            command,
            env=os.environ | {"WANDB_MODE": "offline"},
            stdin=subprocess.PIPE,
            bufsize=0,
            preexec_fn=limit if number == 1 else None,
        )
        leave(run, number, feed)
        files = offline_wandb_files(run.path / "wandb", stream.id)
        steps.append([row["_step"] for path in files for row in wandb_history(path)])
    assert 0 < len(steps[0]) < 1000
    assert steps[1] == list(range(1, 2101))


def test_sync_without_a_key_is_one_error(run: Run) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
    done = subprocess.run(
        [sys.executable, "scripts/tools/sync_wandb.py", str(run.path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 2)
    assert "WANDB_API_KEY is not in the environment" in done.stderr
