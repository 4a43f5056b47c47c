"""`relayrun why`: the first cause of the end of an attempt, from whatever is there of a run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.chain.surroundings import Surroundings, observe
from relayrun.control.rundir.records import AttemptEnd, AttemptOutcome, Hang, RankFailure
from relayrun.control.rundir.run import Run
from relayrun.watch.why import HEAD_BYTES, TAIL_BYTES, Explanation, explain, explanation_lines
from tests.history import began, history_plan

STEPS = "".join(f"iteration {n}/ 1000 | loss 2.0\n" for n in range(200))
TRACEBACK = """Traceback (most recent call last):
  File "/home/ann/train.py", line 12, in <module>
    main()
  File "/home/ann/data.py", line 40, in rows
    return row["text"]
KeyError: 'text'
"""


def bytes_read() -> int:
    """What this process has read from files up to now, in bytes."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "run")
    made.path.mkdir()
    history_plan(made, total_steps=1000).write(made.plan)
    return made


def wrote(run: Run, error: str, output: str = "", *, number: int = 1, cause: str = "failed") -> Explanation:
    """The explanation of a failed attempt that wrote these logs."""
    log = run.path / "job-1.err"
    log.write_text(error)
    log.with_suffix(".out").write_text(output)
    began(run, number, log=str(log))
    end = AttemptEnd(
        attempt=number,
        cause=cause,
        reason="task 0 on n0: Exited with exit code 1",
        exit_code=1,
        durable_iteration=0,
        progress=False,
        end_time=1e9 + 60,
        action="retry",
    )
    end.write(run.attempt(number).end)
    return explain(run, number)


def test_the_exception_of_any_program_is_quoted_with_its_place(run: Run) -> None:
    found = wrote(run, f"{STEPS}{TRACEBACK}srun: error: n1: task 3: Exited with exit code 1\n")
    assert found.quote == "KeyError: 'text' (data.py:40)"
    assert (found.whose, found.certainty, found.rank, found.node) == ("program", "seen", 3, "n1")
    assert (found.file, found.line) == (str(run.path / "job-1.err"), 206)
    assert "data.py:40" in found.next


def test_an_exception_that_went_into_a_pipe_is_found_in_standard_output(run: Run) -> None:
    found = wrote(run, "", STEPS + TRACEBACK)
    assert (found.quote, found.file) == ("KeyError: 'text' (data.py:40)", str(run.path / "job-1.out"))


def test_an_error_that_the_program_survived_is_no_cause(run: Run) -> None:
    found = wrote(run, TRACEBACK + STEPS + "srun: error: n1: task 3: Killed\n")
    assert (found.name, found.certainty, found.node) == ("killed", "inferred", "n1")


def test_without_any_words_the_cause_is_unknown_and_a_command_says_where_to_look(run: Run) -> None:
    found = wrote(run, "hello\nsrun: error: n1: task 0: Exited with exit code 3\n")
    assert (found.name, found.whose, found.certainty) == ("", "unknown", "unknown")
    assert found.next == f"relayrun logs {run.path} --attempt 1 -n 200"


def test_memory_kills_and_a_full_disk_are_inferred_from_the_surroundings(run: Run) -> None:
    began(run, 1)
    Surroundings(time=1.0, oom_kills=2, free_bytes={"/x": 10**9}).write(run.attempt(1).surroundings)
    found = wrote(run, "line 3: 71 Killed   python train.py\n")
    assert (found.name, found.certainty) == ("host-memory", "inferred")
    assert any("/x" in words for words in found.ruled_out)
    Surroundings(time=1.0, oom_kills=0, free_bytes={"/x": 0}).write(run.attempt(1).surroundings)
    found = wrote(run, "hello\n")
    assert (found.name, found.whose, found.certainty) == ("disk-full", "file system", "inferred")


def test_ranks_records_come_before_what_other_ranks_saw(run: Run) -> None:
    began(run, 1)
    run.attempt(1).failures.mkdir()
    for rank, error in enumerate(["RuntimeError: Connection closed by peer", "RuntimeError: CUDA error: ECC"]):
        RankFailure(rank=rank, node=f"n{rank}", error=error, time=float(rank)).write(
            run.attempt(1).failures / f"rank-{rank:04}.json"
        )
    found = wrote(run, "")
    assert (found.name, found.whose, found.rank, found.node) == ("gpu-memory-error", "node", 1, "n1")
    assert "job.exclude=n1" in found.next


def test_setup_outcome_hang_and_cancel_are_told_from_their_records(run: Run) -> None:
    began(run, 1)
    run.attempt(1).setup_failed.write_text("job.setup failed (exit code 1) at: source /no/env\n")
    assert wrote(run, "").quote.startswith("job.setup failed")
    run.attempt(1).setup_failed.unlink()
    hang = Hang(iteration=7, phase="step", seconds=300.0, silent=[2], time=5.0)
    hang.write(run.attempt(1).hang)
    found = wrote(run, "", cause="hang")
    assert (found.name, found.rank) == ("hang", 2)
    outcome = AttemptOutcome(outcome="fatal", reason="ModuleNotFoundError: No module named 'x'", iteration=0, time=1.0)
    outcome.write(run.attempt(1).outcome)
    assert wrote(run, "", cause="fatal").name == "module-missing"
    run.attempt(1).outcome.unlink()
    assert wrote(run, "", cause="cancelled").whose == "person"


def test_a_run_without_plan_and_records_is_explained_by_its_logs(run: Run) -> None:
    wrote(run, TRACEBACK)
    run.plan.write_text("{torn")
    run.attempt(1).end.write_text("")
    found = explain(run)
    assert found.quote == "KeyError: 'text' (data.py:40)"
    assert any("plan.json" in words for words in found.not_read)
    run.attempt(1).begin.write_text("{")
    assert explain(run).certainty == "unknown"


def test_every_further_attempt_has_its_own_words(run: Run) -> None:
    log = run.path / "job-1.err"
    wrote(run, TRACEBACK)
    began(run, 2, log=str(log), log_offset=len(TRACEBACK))
    log.write_text(TRACEBACK + "bash: tran.sh: No such file or directory\n")
    assert explain(run, 1).quote.startswith("KeyError")
    assert explain(run, 2).name == "script-missing"


def test_the_command_prints_lines_or_json_and_writes_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    made = wrote(run, TRACEBACK)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    assert main(["why", str(run.path)]) == 0
    assert capsys.readouterr().out.splitlines() == explanation_lines(made)
    assert main(["why", str(run.path), "--attempt", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "exception"
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    assert main(["why", str(run.path), "--attempt", "9"]) == 2 or "no attempt 9" in capsys.readouterr().err


def test_of_logs_of_64_ranks_with_200_mb_each_the_ends_alone_are_read(run: Run) -> None:
    """Each log is a hole with a beginning and 1 MB of text at its end."""
    log = run.path / "job-1.err"
    text = (STEPS * (2**20 // len(STEPS) + 1)).encode()
    for rank in range(64):
        with open(run.path / f"job-1-{rank}.log", "wb") as file:
            file.write(b"began\n")
            file.seek(200 * 10**6)
            file.write(text)
            file.write(TRACEBACK.encode() if rank == 40 else b"")
    log.write_text("")
    before = bytes_read()
    found = wrote(run, "")
    read = bytes_read() - before
    assert found.file == str(run.path / "job-1-40.log")
    assert found.quote == "KeyError: 'text' (data.py:40)"
    assert sum("bytes between" in words for words in found.not_read) == 64
    assert 64 * TAIL_BYTES <= read < 66 * (HEAD_BYTES + TAIL_BYTES)
    assert os.path.getsize(found.file) > TAIL_BYTES


@pytest.mark.parametrize(
    ("size", "end", "quote"),
    [
        (10 << 30, b"", ""),
        (10 << 30, TRACEBACK.encode(), "KeyError: 'text'"),
        (300 << 20, b"loss 1.0 Error: " * (5 << 16), "loss 1.0 Error: loss"),
        (300 << 20, b"\r 10%|####      | 1/10" * (5 << 15), ""),
        (300 << 20, b"x" * (5 << 20) + b"\n" + TRACEBACK.encode(), "KeyError: 'text'"),
    ],
    ids=["sparse", "sparse-with-an-end", "one-line-of-errors", "progress-bar", "one-line-before-the-end"],
)
def test_a_log_of_10_gb_or_of_one_line_is_explained_within_a_second(
    run: Run, size: int, end: bytes, quote: str
) -> None:
    """All but the end of the file is a hole. A line of 4 MB with words like an error took more than four minutes."""
    error = run.path / "job-1.err"
    with error.open("wb") as file:
        file.truncate(size - len(end))
        file.seek(0, os.SEEK_END)
        file.write(end)
    began(run, 1, log=str(error))
    start = time.process_time()
    found = explain(run, 1)
    assert time.process_time() - start < 1
    assert quote in found.quote


def test_surroundings_name_what_is_full_and_what_does_not_resolve(tmp_path: Path) -> None:
    found = observe([str(tmp_path), "/no/such"], ["localhost", "no-such-host.invalid"])
    assert list(found.free_bytes) == [str(tmp_path)]
    assert found.full == []
    assert "localhost" not in found.unresolved
    assert Surroundings(time=0.0, free_bytes={"/a": 10, "/b": 10**9}, free_inodes={"/b": 0}).full == ["/a", "/b"]
