"""Where dumps stand: the table, the forecast and the failures, from files alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relayrun import cli
from relayrun.errors import InputError
from relayrun.tokens.tokenize.dump_jobs import prepare_submission, tokenize_dump
from relayrun.tokens.tokenize.dump_status import (
    GONE_SECONDS,
    all_dumps_done,
    mean_tokens_per_byte,
    read_status,
    seconds_left,
    status_table,
)
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.job_config import TokenizationSettings
from relayrun.tokens.tokenize.shard_folder import PROGRESS_FOLDER, STALE_SECONDS, TaskProgress
from tests.tokenization_corpus import TEXTS, dump_settings, train_tokenizer, write_parquet
from tests.waiting import wait_for


@pytest.fixture
def settings(tmp_path: Path) -> TokenizationSettings:
    """Two dumps of one file each, begun."""
    (tmp_path / "data").mkdir()
    for name, texts in (("a", TEXTS[::-1]), ("b", TEXTS)):
        write_parquet(tmp_path / "data" / f"{name}.parquet", list(texts))
    prepare_dumps(tmp_path / "data", tmp_path / "meta", n_dumps=2)
    settings = dump_settings(tmp_path, train_tokenizer(tmp_path / "tok" / "tokenizer.json"))
    prepare_submission(settings)
    return settings


@pytest.mark.slow
def test_the_table_says_what_is_done_and_what_is_not(
    settings: TokenizationSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    row = tokenize_dump(settings, 1)
    waiting, done = read_status(settings.metadata_folder)
    assert (waiting.state, len(waiting.finished), waiting.of) == ("waiting", 0, 0)
    assert (done.state, len(done.finished), done.of, done.tokens) == ("done", 1, 1, row["total_tokens_processed"])
    assert done.core_rate > 0
    assert done.node_rate == pytest.approx(done.core_rate)  # of one worker
    assert not (settings.dump_output(1) / PROGRESS_FOLDER).exists()
    capsys.readouterr()
    assert cli.main(["dumps", "status", settings.metadata_folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["0", "waiting", "-"]
    assert lines[2].split()[:4] == ["1", "done", "1/1", f"{done.tokens:,}"]
    assert lines[3].split()[:3] == ["total", "1/2", "done"]


def running(settings: TokenizationSettings, dump: int, **values: object) -> None:
    """A task that has worked for 100 s and said so `age` seconds ago."""
    output = settings.dump_output(dump)
    output.mkdir(parents=True, exist_ok=True)
    TaskProgress(output, "00007_tokens")
    file = output / PROGRESS_FOLDER / "00007_tokens.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"started": said["at"] - 100, "node": "n3", **values}))


def test_running_tasks_count_and_forecast_the_end(settings: TokenizationSettings) -> None:
    tokenize_dump(settings, 1)
    running(settings, 0, tokens=50, documents=3)
    first, second = read_status(settings.metadata_folder)
    assert (first.state, first.tokens, first.nodes) == ("running", 50, "n3")
    assert first.node_rate == pytest.approx(0.5)
    assert first.bytes == (Path(settings.metadata_folder) / "raw-dataset-link" / "a.parquet").stat().st_size
    density = mean_tokens_per_byte([first, second])
    assert density == second.tokens / second.bytes
    left = seconds_left([first, second], tokens_per_byte=density, rate=first.node_rate)
    assert left == pytest.approx((first.bytes * density - 50) / 0.5)
    assert "0:16 h" in status_table([first, second]).splitlines()[1]
    (Path(settings.metadata_folder) / "dump-sizes.json").unlink()
    assert seconds_left(read_status(settings.metadata_folder), tokens_per_byte=density, rate=1) is None


def test_a_task_that_says_nothing_is_named(settings: TokenizationSettings) -> None:
    running(settings, 0, tokens=50)
    later = time.time() + STALE_SECONDS + 1
    stalled, waiting = read_status(settings.metadata_folder, now=later)
    assert (stalled.state, stalled.tokens, waiting.state) == ("stalled", 0, "waiting")
    assert "dump 0: no word from n3 since" in status_table([stalled, waiting])


@pytest.mark.slow
def test_a_dump_that_failed_is_named_until_it_is_done(settings: TokenizationSettings) -> None:
    broken = settings.model_copy(update={"column": "nope"})
    with pytest.raises(InputError):
        tokenize_dump(broken, 0)
    failed, _ = read_status(settings.metadata_folder)
    assert failed.state == "failed"
    assert "no column 'nope'" in status_table([failed])
    tokenize_dump(settings, 0)
    done, _ = read_status(settings.metadata_folder)
    assert (done.state, done.error) == ("done", None)


def test_files_that_were_left_out_are_named(settings: TokenizationSettings) -> None:
    (Path(settings.metadata_folder) / "raw-dataset-link" / "a.parquet").write_bytes(b"torn")
    with pytest.raises(InputError, match="no document with text"):
        tokenize_dump(settings.model_copy(update={"on_error": "skip-file"}), 0)
    assert "dump 0 left out: " in status_table(read_status(settings.metadata_folder))


@pytest.mark.slow
def test_watch_ends_with_code_1_when_what_is_not_done_has_failed(
    settings: TokenizationSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[float] = []

    def slept(seconds: float) -> None:
        rounds.append(seconds)
        assert len(rounds) <= 2, "it does not end"
        if len(rounds) == 1:  # the other one was queued until now
            tokenize_dump(settings, 1)
        else:
            (settings.dump_output(0) / PROGRESS_FOLDER / "00007_tokens.json").unlink()

    with pytest.raises(InputError):
        tokenize_dump(settings.model_copy(update={"column": "nope"}), 0)
    running(settings, 0, tokens=50)  # of another task of the dump that failed
    monkeypatch.setattr(time, "sleep", slept)
    assert cli.main(["dumps", "status", settings.metadata_folder, "--watch", "7"]) == 1
    assert rounds == [7, 7]


@pytest.mark.slow
def test_a_dump_without_a_word_for_long_is_not_waited_for(settings: TokenizationSettings) -> None:
    tokenize_dump(settings, 1)
    running(settings, 0, tokens=50)
    for seconds, expected in ((0.0, None), (STALE_SECONDS + 1, None), (GONE_SECONDS + 1, False)):
        now = time.time() + seconds
        assert all_dumps_done(read_status(settings.metadata_folder, now=now), now=now) is expected
    tokenize_dump(settings, 0)
    assert all_dumps_done(read_status(settings.metadata_folder), now=time.time()) is True


@pytest.mark.slow
def test_a_task_says_how_far_it_is_and_watch_ends_when_all_is_done(
    settings: TokenizationSettings, tmp_path: Path
) -> None:
    file = tmp_path / "data" / "a.parquet"
    content = file.read_bytes()
    file.unlink()
    os.mkfifo(file)
    tokenize_dump(settings, 1)
    call = f"tokenize_dump(TokenizationSettings(**{settings.model_dump()!r}), 0)"
    code = f"from relayrun.tokens.tokenize.dump_jobs import *; {call}"
    with subprocess.Popen([sys.executable, "-c", code]) as process:

        def runs() -> bool:
            assert process.poll() is None
            return read_status(settings.metadata_folder)[0].state == "running"

        wait_for(runs)
        watch = [sys.executable, "-m", "relayrun.cli", "dumps", "status", settings.metadata_folder, "--watch", "0.2"]
        with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as watching:
            process.kill()
            process.wait()
            file.unlink()
            file.write_bytes(content)
            tokenize_dump(settings, 0)
            output, _ = watching.communicate(timeout=300)
    assert watching.returncode == 0
    assert any(line.startswith("total  2/2 done") for line in output.splitlines()[-2:])


def test_a_folder_without_dumps_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dumps", "status", str(tmp_path)]) == 1
    assert "there are no dumps here" in capsys.readouterr().err
