"""The process beside a rank that reads its streams: the same samples and cursors, its errors, its death, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relayrun.errors import InputError
from relayrun.files import write_json
from relayrun.tokens.mixture import stream_worker
from relayrun.tokens.mixture.build_datasets import training_order
from relayrun.tokens.mixture.stream_worker import RankStreamWorker, StreamWorkerDied
from relayrun.tokens.order.sampler import MixtureSampler, ReplicaSampleReader
from relayrun.tokens.shards.manifest import Manifest
from tests import streaming
from tests.streaming import write
from tests.tokens.test_streams_audit import WORDS, StreamedRun
from tests.waiting import read_line, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> StreamedRun:
    made = StreamedRun(tmp_path, on_error="fail")
    write(made.text, "jsonl", [40, 300, 30], extra=WORDS)
    made.submit(web=2.0, tokens=1.0)
    return made


def order_of(run: StreamedRun, state: dict[str, Any] | None = None) -> MixtureSampler:
    order = training_order(run.config, Manifest.read(run.dir.manifest))
    if state is not None:
        order.resume(json.loads(json.dumps(state)))
    return order


def beside(
    run: StreamedRun, order: MixtureSampler, consumed: int, replica: int, replicas: int
) -> tuple[Any, RankStreamWorker]:
    worker = RankStreamWorker(
        run.config, run.dir.manifest, order, consumed=consumed, replica=replica, replicas=replicas
    )
    return order.lane_reader(consumed, replica, replicas, openers=worker.openers()), worker


def read(reading: ReplicaSampleReader, first: int, end: int) -> list[tuple[int, str, int, Any]]:
    found = []
    for k in reading.numbers(first, end):
        row = reading.row(k)
        found.append((k, streaming.digest(row), row.padding, json.dumps(reading.cursors(k + 1))))
    return found


@pytest.mark.parametrize(("replica", "replicas"), [(0, 1), (1, 2)])
def test_samples_and_cursors_are_those_of_a_rank_that_reads_by_itself(
    run: StreamedRun, replica: int, replicas: int
) -> None:
    """Also behind a state, and where samples are passed over."""
    order = order_of(run)
    first = order.lane_reader(0, 0, 1)
    read(first, 0, 40)
    state = order.state(40, [first.cursors(40)])
    first.close()
    for consumed in (40, 60):
        alone = order_of(run, state).lane_reader(consumed, replica, replicas)
        expected = read(alone, consumed, consumed + 120)
        alone.close()
        reading, worker = beside(run, order_of(run, state), consumed, replica, replicas)
        assert read(reading, consumed, consumed + 120) == expected
        reading.close()
        assert worker._process.returncode is not None


@pytest.mark.parametrize("held_up", [False, True])
def test_a_worker_that_is_killed_is_named(run: StreamedRun, held_up: bool) -> None:
    """Also where it is held up by a full pipe, which then ends within a piece."""
    reading, worker = beside(run, order_of(run), 0, 0, 1)
    read(reading, 0, 4)
    if held_up:
        wait_for(lambda: waits_to_write(worker.pid))
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(
        StreamWorkerDied, match=rf"reads this rank's streams \(pid {worker.pid}\) was killed by SIGKILL"
    ):
        read(reading, 4, 1 << 30)  # behind what is in the pipe
    reading.close()


def test_an_error_of_the_worker_is_the_error_of_the_rank(run: StreamedRun) -> None:
    path = run.text / "000.jsonl"
    lines = path.read_bytes().splitlines()
    lines[3] = b"torn" + lines[3][4:]
    path.write_bytes(b"\n".join(lines) + b"\n")
    run.submit()
    reading, _ = beside(run, order_of(run), 0, 0, 1)
    with pytest.raises(InputError, match=r"000\.jsonl:4: this line is not JSON"):
        read(reading, 0, 1 << 30)
    with pytest.raises(InputError, match=r"000\.jsonl:4: this line is not JSON"):
        read(reading, 0, 8)  # as of a rank that reads by itself, and not that the process has ended
    reading.close()


def test_signals_of_the_job_do_not_end_it_and_the_pipe_bounds_it(run: StreamedRun) -> None:
    reading, worker = beside(run, order_of(run), 0, 0, 1)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):  # also while it starts
        os.kill(worker.pid, number)
    read(reading, 0, 8)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        os.kill(worker.pid, number)
    wait_for(lambda: waits_to_write(worker.pid))
    assert worker._process.poll() is None
    read(reading, 8, 64)
    reading.close()


def test_a_start_does_not_wait_for_pandas(run: StreamedRun) -> None:
    """Some functions of Arrow import it, which takes half a second."""
    reading, worker = beside(run, order_of(run), 0, 0, 1)
    read(reading, 0, 8)
    mapped = Path(f"/proc/{worker.pid}/maps").read_text()
    reading.close()
    assert "/pyarrow/" in mapped
    assert "/pandas/" not in mapped


def test_it_ends_with_its_rank_however_that_dies(run: StreamedRun, tmp_path: Path) -> None:
    """The rank is another process here, which is killed."""
    code = (
        "import json, sys, time\n"
        "from pathlib import Path\n"
        "from relayrun.config.compose.schema import RunConfig\n"
        "from relayrun.tokens.mixture.build_datasets import training_order\n"
        "from relayrun.tokens.mixture.stream_worker import RankStreamWorker\n"
        "from relayrun.tokens.shards.manifest import Manifest\n"
        "config = RunConfig.model_validate(json.loads(Path(sys.argv[1]).read_text()))\n"
        "order = training_order(config, Manifest.read(sys.argv[2]))\n"
        "worker = RankStreamWorker(config, Path(sys.argv[2]), order, consumed=0, replica=0, replicas=1)\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    write_json(tmp_path / "config.json", run.config.model_dump(mode="json"))
    command = [sys.executable, "-c", code, str(tmp_path / "config.json"), str(run.dir.manifest)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        pid = int(read_line(rank))
        wait_for(lambda: waits_to_write(pid))
        rank.kill()
    stat = Path(f"/proc/{pid}/stat")
    wait_for(lambda: not stat.exists() or "Z" in stat.read_text().rpartition(")")[2])


def waits_to_write(pid: int) -> bool:
    """Whether a process has filled its pipe: its main thread sleeps in a write."""
    try:
        return "pipe_write" in Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        pytest.skip("this kernel does not tell what a process waits for")


@pytest.mark.parametrize("remote", [False, True])
def test_a_worker_has_no_secret_but_for_files_below_urls(
    run: StreamedRun, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    """The engine of a tokenizer is a package of somebody else."""
    monkeypatch.setenv("HF_TOKEN", "a-secret-0123456789")
    monkeypatch.setenv("WORDS", "kept")
    made = stream_worker._environment(remote=remote)
    assert ("HF_TOKEN" in made) == remote
    order = order_of(run)
    _, worker = beside(run, order, 0, 0, 1)
    try:
        found = wait_for(Path(f"/proc/{worker.pid}/environ").read_bytes)  # empty until the program has begun
        assert b"a-secret-0123456789" not in found
        assert b"WORDS=kept" in found
    finally:
        worker.close()
