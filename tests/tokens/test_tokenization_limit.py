"""A job of a dump that comes to its time limit queues itself again and loses no finished shard."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relayrun.errors import RelayrunError
from relayrun.tokens.tokenize.dump_jobs import prepare_submission
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.job_config import settings_from_environment
from relayrun.tokens.tokenize.processes import requeue_before_time_limit
from tests.tokenization_corpus import TEXTS, expected_ids, shard_documents, train_tokenizer, write_parquet
from tests.tokens.test_preprocess import workers_of
from tests.waiting import wait_for


@pytest.mark.slow
@pytest.mark.parametrize("how", ["signal", pytest.param("deadline", marks=pytest.mark.long)])
def test_a_job_near_its_limit_drops_its_open_shard_and_queues_itself_again(tmp_path: Path, how: str) -> None:
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "a.parquet", list(TEXTS))
    (tmp_path / "data" / "b.jsonl").write_text("\n")
    prepare_dumps(tmp_path / "data", tmp_path / "meta")
    (tmp_path / "data" / "b.jsonl").unlink()
    os.mkfifo(tmp_path / "data" / "b.jsonl")  # its reader waits for ever
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "scontrol"
    limit = "TimeLimit=UNLIMITED"
    if how == "deadline":  # from when it is asked, so that the start of Python does not count
        limit = 'TimeLimit=00:01:00 EndTime=$(date -d "+30 seconds" +%Y-%m-%dT%H:%M:%S)'
    fake.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n[ "$1" != show ] || echo "JobId=77 {limit}"\n')
    fake.chmod(0o755)
    tokenizer = train_tokenizer(tmp_path / "tok" / "tokenizer.json")
    environment = os.environ | {
        "TOKENIZER": str(tokenizer),
        "TOKENIZER_NAME": "t",
        "DATASET_NAME": "d",
        "PATH_TO_PREPROCESSING_METADATA": str(tmp_path / "meta"),
        "PATH_TO_OUTPUT_FOLDER": str(tmp_path / "tokens"),
        "PATH_TO_LOGS": str(tmp_path / "logs"),
    }
    settings = settings_from_environment(environment)
    prepare_submission(settings)
    environment |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    command = [sys.executable, "-m", "relayrun.tokens.tokenize", "run", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out = settings.dump_output(0)
    record = out / "tokenization.json"

    def is_stuck() -> bool:
        assert process.poll() is None, process.communicate(timeout=300)
        first_is_done = record.exists() and '"00000_tokens": {' in record.read_text()
        return first_is_done and (out / "00001_tokens.bin.tmp").exists()

    wait_for(is_stuck)
    workers = workers_of(process.pid)
    if how == "signal":
        process.send_signal(signal.SIGUSR2)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert errors == (
        "error: Slurm job 77: the time limit is near; the job is queued again and goes on with what is missing\n"
    )
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[-1] == "requeue 77"
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert not list(out.glob("*.tmp"))
    assert list(json.loads((out / "tokenization.json").read_text())["shards"]) == ["00000_tokens"]
    (tmp_path / "data" / "b.jsonl").unlink()
    (tmp_path / "data" / "b.jsonl").write_text('{"text": "end"}\n')
    fake.write_text(fake.read_text().replace(limit, "TimeLimit=UNLIMITED"))  # it was that of the first start
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    assert "00000_tokens" not in again.stdout
    assert shard_documents(out / "00001_tokens") == expected_ids(tokenizer, ["end"])


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a scontrol was asked that knows a job with a time limit in an hour."""
    ends = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3600))
    fake = tmp_path / "scontrol"
    job = f"JobId=78 JobState=RUNNING TimeLimit=01:00:00 EndTime={ends}"
    fake.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n[ "$1" != show ] || echo "{job}"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_END_TIME", "SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    return tmp_path / "asked"


def orders(asked: Path) -> list[str]:
    return [line for line in asked.read_text().splitlines() if not line.startswith("show")]


def leave(progress: list[int], *, signalled: bool = True) -> str:
    def work() -> None:
        with requeue_before_time_limit(lambda: progress.pop(0)):
            if signalled:
                os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(10)

    with pytest.raises(RelayrunError) as caught:
        work()
    return str(caught.value)


@pytest.mark.slow
def test_a_job_whose_shards_do_not_fit_into_its_time_ends_at_the_second_start(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_the_limit(*progress: int) -> str:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 2))
        return leave(list(progress), signalled=False)

    assert "is queued again" in at_the_limit(3, 3)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "is queued again" in at_the_limit(3, 4)
    assert orders(asked) == ["update JobId=78 Requeue=1", "requeue 78"] * 2
    assert "no shard was finished before the time limit, for the second time" in at_the_limit(4, 4)
    assert len(orders(asked)) == 4
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))
    assert "is queued again" in leave([4, 4])  # it was told to leave long before its limit


def test_an_element_of_an_array_queues_itself_again_and_not_the_array(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "78")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "9")
    leave([0, 1])
    assert orders(asked)[-2:] == ["update JobId=78_9 Requeue=1", "requeue 78_9"]


def test_the_limit_is_asked_for_where_the_environment_does_not_say_it(asked: Path) -> None:
    with requeue_before_time_limit(lambda: 0):
        assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(3600 - 120, abs=10)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert asked.read_text() == "show job --oneliner 78\n"
