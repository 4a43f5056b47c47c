"""The line and the merged views, for any history of a run: what is read from the end, or appended, is what reading all
of it from the beginning gives."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayrun.control.rundir import merged_metrics, restarts
from relayrun.control.rundir.checkpoint_records import Lineage, ResumePoint
from relayrun.control.rundir.merged_metrics import MergedViews, newest_valid_lines, valid_lines
from relayrun.control.rundir.records import AttemptEnd, AttemptStart, CheckpointCommit
from relayrun.control.rundir.restarts import FailedRestart, Rollback
from relayrun.control.rundir.run import Run
from relayrun.files import append_line, read_json_lines, read_json_lines_backwards
from tests.history import began


@contextmanager
def fresh_run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder:
        yield Run(Path(folder))


def begin(run: Run, number: int, base: int) -> AttemptStart:
    return began(run, number, base=base, job_id=str(number), start_time=float(number))


def end(run: Run, number: int) -> None:
    fields: dict[str, Any] = {"exit_code": 0, "durable_iteration": 0, "progress": True, "end_time": 0.0}
    AttemptEnd(attempt=number, cause="saved", reason="x", action="continue", **fields).write(run.attempt(number).end)


def line_from_the_beginning(run: Run) -> list[CheckpointCommit]:
    """The rule of decision 0001, attempt by attempt."""
    found: list[CheckpointCommit] = []
    for number in run.attempt_numbers():
        began = AttemptStart.read(run.attempt(number).begin)
        if began is None:
            continue
        found = [commit for commit in found if commit.iteration <= began.base_iteration]
        if began.base_path is not None and not any(commit.iteration == began.base_iteration for commit in found):
            found.append(
                CheckpointCommit(
                    iteration=began.base_iteration,
                    path=began.base_path,
                    consumed_samples=-1,
                    time=began.start_time,
                    seconds=0.0,
                )
            )
        found += run.attempt(number).read_commits()
    return found


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.lists(st.integers(1, 4), max_size=3), st.booleans()), max_size=7))
def test_the_line_read_from_its_end_is_the_line_read_from_the_beginning(
    attempts: list[tuple[int, list[int], bool]],
) -> None:
    with fresh_run() as run:
        for number, (base, gains, begun) in enumerate(attempts, start=1):
            attempt = run.attempt(number)
            if begun:
                begin(run, number, base)
            else:
                attempt.path.mkdir(parents=True)
            at = base
            for gain in gains:
                at += gain
                attempt.append_commit(
                    CheckpointCommit(
                        iteration=at, path=str(run.checkpoint(at)), consumed_samples=at, time=number, seconds=1.0
                    )
                )
        assert Lineage(run).line() == line_from_the_beginning(run)


LINES = st.lists(
    st.one_of(
        st.binary(max_size=8).filter(lambda text: b"\n" not in text),
        st.integers(0, 10**6).map(lambda number: json.dumps({"n": number}).encode()),
        st.integers(0, 200_000).map(lambda size: json.dumps({"text": "ü" * size}).encode()),
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(LINES, st.sampled_from([b"", b'{"torn": 1', b'{"torn": 1}']), st.booleans())
def test_a_file_is_read_backwards_as_forwards(lines: list[bytes], torn: bytes, by_end: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines"
        whole = b"".join(text + b"\n" for text in lines)
        path.write_bytes(whole + torn + (b'\n{"later": 1}\n' if by_end else b""))
        found = list(read_json_lines_backwards(path, end=len(whole) + len(torn) if by_end else None))
        path.write_bytes(whole)
        assert [value for _, value in found][::-1] == list(read_json_lines(path))
        assert all(whole[:behind].endswith(b"\n") for behind, _ in found)
        assert all(json.loads(whole[:behind].splitlines()[-1]) == value for behind, value in found)


STEP = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 6)),
    st.tuples(st.just("evaluate"), st.just(0)),
    st.tuples(st.just("torn"), st.just(0)),
    st.tuples(st.sampled_from(["rollback", "rollback without its line"]), st.integers(0, 5)),
    st.tuples(st.just("next restart"), st.integers(0, 5)),
    st.tuples(st.just("next attempt"), st.integers(0, 8)),
    st.tuples(st.just("killed before it began"), st.just(0)),
    st.tuples(st.just("end"), st.just(0)),
    st.tuples(st.just("watch"), st.just(0)),
    st.tuples(st.just("another watch"), st.just(0)),
    st.tuples(st.sampled_from(["lose views.json", "tear views.json", "lose the view", "shorten the view"]), st.just(0)),
    st.tuples(st.just("a zombie appends"), st.just(0)),
)


def failed_restart(durable: int) -> FailedRestart:
    values = {"restart": 1, "time": 1.0, "rank": 0, "node": "n", "words": "killed", "iteration": 0, "again": True}
    return FailedRestart.of(values | {"base_iteration": 0, "durable_iteration": durable, "next_iteration": durable})


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=25))
def test_the_appended_views_hold_what_counts(steps: list[tuple[str, int]]) -> None:
    with fresh_run() as run:
        begin(run, 1, 0)
        number = newest = 1
        at, base, bare = 0, 0, False
        watch = MergedViews(run)
        for what, much in [*steps, ("end", 0)]:
            metrics = run.attempt(number).metrics
            if what == "train" and not bare:
                for _ in range(much):
                    at += 1
                    append_line(metrics, {"iteration": at, "attempt": number, "step_seconds": 1.0}, durable=False)
            elif what == "evaluate" and at > base and not bare:
                append_line(metrics, {"iteration": at, "evaluation_seconds": float(at)}, durable=False)
            elif what == "torn" and not bare:
                with open(metrics, "ab") as file:
                    file.write(b'{"iteration": ')
            elif what.startswith("rollback") and not bare and at > base:
                at = max(base, at - much)
                rollback = Rollback(iteration=9, reason="", base_iteration=at, next_sample=1, time=1.0)
                rollback.append(run.attempt(number).rollbacks)
                if what == "rollback":
                    append_line(metrics, {"iteration": at, "rollback": {}}, durable=False)
                else:
                    bare = True  # it was killed between the two
            elif what == "next restart":  # its ranks were killed wherever they were, and are started again
                at, bare = max(base, at - much), False
                failed_restart(at).append(run.attempt(number).failed_restarts)
                restarts.prepare_restart(run, run.attempt(number), ResumePoint(iteration=at, path=None), next_restart=2)
            elif what == "next attempt":
                newest += 1
                number, at, bare = newest, max(0, at - much), False
                base = at
                begin(run, number, base)
                watch = MergedViews(run)
            elif what == "killed before it began":
                newest += 1
                run.attempt(newest).path.mkdir()
            elif what == "watch":
                watch.update(attempt=number)
            elif what == "another watch":
                watch = MergedViews(run)
            elif what == "lose views.json":
                run.views.unlink(missing_ok=True)
            elif what == "tear views.json":
                run.views.write_text('{"attempt": 1, "off')
            elif what == "lose the view":
                run.metrics_view.unlink(missing_ok=True)
                run.attempts_view.unlink(missing_ok=True)
            elif what == "shorten the view" and run.metrics_view.exists():
                os.truncate(run.metrics_view, run.metrics_view.stat().st_size // 2)
            elif what == "a zombie appends" and run.metrics_view.exists():
                with open(run.metrics_view, "ab") as file:
                    file.write(b'{"iteration": 1, "zombie": 1}\n')
            elif what == "end":
                end(run, number)
                MergedViews(Run(run.path)).update()
                expected = list(valid_lines(run))
                assert list(read_json_lines(run.metrics_view)) == expected
                assert list(newest_valid_lines(run))[::-1] == expected or bare
                seconds = [entry["evaluation_seconds"] for entry in expected if "evaluation_seconds" in entry]
                assert merged_metrics.evaluation_seconds(run, 1000) == seconds
                rows = list(read_json_lines(run.attempts_view))
                begun = [n for n in run.attempt_numbers() if AttemptStart.read(run.attempt(n).begin) is not None]
                assert [row["attempt"] for row in rows] == begun
                assert all(("cause" in row) == run.attempt(row["attempt"]).end.exists() for row in rows)
                steps_seen = [entry["iteration"] for entry in expected if "step_seconds" in entry]
                assert steps_seen == sorted(set(steps_seen))
                at = min(at, max(steps_seen, default=base)) if not bare else at
                newest += 1  # its supervisor has closed it: what trains on is another attempt
                number, bare = newest, False
                base = at
                begin(run, number, base)
                watch = MergedViews(run)


def test_a_hole_in_a_file_is_read_in_time_that_grows_with_its_size(tmp_path: Path) -> None:
    """A file system that crashed leaves zeros: joined block by block they took 118 s for 50 MB, four times that for
    twice as much."""
    path = tmp_path / "lines.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"a": 1}\n')
        file.write(bytes(40 << 20) + b"\n")
        file.write(b'{"a": 2}\n')
    begin = time.process_time()
    assert [value for _, value in read_json_lines_backwards(path)] == [{"a": 2}, {"a": 1}]
    assert time.process_time() - begin < 20
