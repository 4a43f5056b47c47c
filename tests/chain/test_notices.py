"""Somebody is told: from the records of a run to a message on loopback, and what a kill, a full disk, a silent receiver
or another process that sends cannot lose, double or hold up."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.chain import background
from relayrun.control.notify import notices
from relayrun.control.rundir.evaluations import EvaluationResult
from relayrun.control.rundir.node_health import HealthFinding
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd, Hang
from relayrun.control.rundir.restarts import Rollback
from relayrun.control.rundir.run import Run, write_stop
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.files import append_line
from relayrun.watch import unsent_notices
from tests.chain.notice_steps import end, noted, sent, states, tell
from tests.history import STEP, began
from tests.receivers import Mailbox, Web
from tests.waiting import wait_for

from .conftest import MakeRun
from .test_again import refusing_python

# what follows from the records


def test_without_a_policy_nobody_looks(run: Run) -> None:
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    background.send_notices(run, Plan.load(run))
    assert not run.notices.exists()


def test_a_stop_whoever_wrote_it_is_told_once(run: Run, web: Web) -> None:
    """The batch script writes STOP without Python; then the next who looks tells it."""
    tell(run, f"json://127.0.0.1:{web.port}/x")
    run.stop.write_text("begin failed in job 7 on n3 (exit code 1), 6 times in a row\n\nThe chain has ended.\n")
    (name,) = noted(run)
    assert sent(run) == []
    assert noted(run) == {}
    assert sent(run) == []
    ((_, _, content),) = web.requests
    message = json.loads(content)
    assert message["event"] == "stopped"
    assert message["title"] == (
        "[relayrun] tests/history on local: the chain has stopped: begin failed in job 7 on n3 (exit code 1), 6 times "
        "in a row"
    )
    assert f"go on:     relayrun resume {run.path}" in message["message"]
    assert states(run) == {f"{name}.told": ["sent"]}


def test_a_submit_begins_anew(run: Run) -> None:
    policy = tell(run, "json://x/")
    write_stop(run, ChainEnd("stopped", "stopped by ada"))
    assert len(noted(run)) == 1
    notices.write_notice_policy(run, replace(policy, since=6.0))
    assert len(noted(run)) == 2


def test_done_is_another_event_than_stopped(run: Run) -> None:
    tell(run, "json://x/", events=("done",))
    write_stop(run, ChainEnd("done", "the last iteration, 3000, is saved"))
    assert [name.partition("-")[0] for name in noted(run)] == ["done"]


def test_a_hang_and_failures_in_a_row(run: Run) -> None:
    tell(run, "json://x/", failed_attempts=2)
    end(run, 4, "hang")
    assert noted(run) == {"hang-0004": "attempt 4: hang, it says"}
    end(run, 5, "failed")
    began(run, 6, base=300)  # runs
    told = noted(run)
    assert set(told) == {"hang-0004", "failed-0005"}
    assert told["failed-0005"].startswith("2 attempts in a row without a new checkpoint; attempt 5: failed")
    end(run, 6, "failed", progress=True)
    assert set(noted(run)) == set(told)


def test_a_failed_attempt_is_told_in_the_words_of_why(run: Run) -> None:
    tell(run, "json://x/", failed_attempts=1)
    end(run, 4, "failed", when=time.time())
    record = run.attempt(4).read_end()
    assert record is not None
    replace(record, failure="quota").write(run.attempt(4).end)
    assert "a quota is used up (quota; whose: file system); next: " in noted(run)["failed-0004"]


def test_an_attempt_that_ends_the_chain_is_told_with_the_stop(run: Run) -> None:
    tell(run, "json://x/", failed_attempts=1)
    end(run, 4, "fatal", action="stop")
    assert noted(run) == {}
    tell(run, "json://x/", events=("failed",), failed_attempts=1)
    assert set(noted(run)) == {"failed-0004"}


def test_what_happened_before_the_submit_is_not_told(run: Run) -> None:
    tell(run, "json://x/", since=2e9, failed_attempts=1)
    end(run, 4, "hang", when=1.9e9)
    append_line(run.evaluations_view, vars(EvaluationResult(iteration=100, attempt=1, status="done", time=1.9e9)))
    assert noted(run, now=2e9 + 1) == {}


def test_no_durable_progress_counts_from_where_a_job_could_make_some(run: Run) -> None:
    tell(run, "json://x/", no_progress=3600.0)  # the newest commit is of 1e9 + 3
    began(run, 4, base=300)
    assert noted(run, now=1e9 + 3600) == {}
    run.attempt(4).begin.write_text(
        run.attempt(4).begin.read_text().replace("1000000004.0", str(1e9 + 50_000))  # it waited in the queue
    )
    assert noted(run, now=1e9 + 53_000) == {}
    assert set(noted(run, now=1e9 + 53_601)) == {"stalled-0000300-4-1"}
    assert len(noted(run, now=1e9 + 53_700)) == 1
    assert len(noted(run, now=1e9 + 57_201)) == 2


def test_bad_losses_and_rollbacks(run: Run) -> None:
    tell(run, "json://x/")
    began(run, 4, base=300)
    attempt = run.attempt(4)
    for iteration, change in ((301, {}), (302, {"skipped": "loss 99 is a spike"}), (303, {"loss": float("nan")})):
        append_line(attempt.metrics, json.loads(STEP.format(iteration)) | change)
    assert noted(run) == {"anomaly-0004-303": "iteration 303: loss nan"}
    assert notices.pending_notices(run)[0][0].count == 2
    append_line(attempt.metrics, json.loads(STEP.format(304)) | {"skipped": "loss 98 is a spike"})
    Rollback(iteration=305, reason="loss nan", base_iteration=300, next_sample=9, time=7e8).append(attempt.rollbacks)
    told = noted(run)
    assert told["anomaly-0004-304"] == "iteration 304: loss 98 is a spike"
    assert told["anomaly-0004-rollback-700000000"] == "training went back to iteration 300 from iteration 305: loss nan"
    assert {entry.id: entry.count for entry, _ in notices.pending_notices(run)}["anomaly-0004-304"] == 1


def test_a_disk_that_is_nearly_full(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(run, "json://x/")
    began(run, 4, base=300)
    assert noted(run) == {}

    def nearly_full(_path: object) -> os.statvfs_result:
        return os.statvfs_result((1, 1, 100, 9, 9, 1, 1, 1, 0, 255))  # 9 bytes are free; a checkpoint has 5

    monkeypatch.setattr(os, "statvfs", nearly_full)
    assert "room for 1 more checkpoints" in noted(run)["disk-0004"]
    append_line(run.attempt(4).failed_saves, {"iteration": 310, "error": "[Errno 28] No space left on device"})
    assert "a save of iteration 310 failed" in noted(run)["disk-0004-310"]


def test_a_sick_node(run: Run) -> None:
    tell(run, "json://x/")
    began(run, 4, base=300)
    found = HealthFinding(node="n1", check="gpus", value=3, limit=4, words="3 GPUs answer", hard=True, time=1e9)
    soft = HealthFinding(node="n2", check="tmp", value=0, limit=1, words="0 GB are free", hard=False, time=1e9)
    left_out = [replace(each, action="left out") for each in (found, soft)]
    for each in (soft, *left_out, replace(found, action="ended", reason="nobody is left")):
        each.append(run.attempt(4).node_health)
    assert noted(run) == {
        "node-0004-2": "attempt 4: n1: 3 GPUs answer; left out",
        "node-0004-3": "attempt 4: n2: 0 GB are free; left out",
        "node-0004-4": "attempt 4: n1: 3 GPUs answer; ends the attempt, nobody is left",
    }


def test_an_evaluation_with_its_scores(run: Run) -> None:
    tell(run, "json://x/")
    done = EvaluationResult(
        iteration=100, attempt=1, status="done", time=1e9, results={"arc": {"acc": 0.51, "acc_stderr": 0.1}}
    )
    append_line(run.evaluations_view, vars(done))
    append_line(
        run.evaluations_view,
        vars(EvaluationResult(iteration=200, attempt=2, status="failed", time=1e9, error="no GPU")),
    )
    assert noted(run) == {
        "evaluation-0000100-0001": "evaluation of iteration 100: arc acc 0.51",
        "evaluation-0000200-0002": "evaluation of iteration 200: failed: no GPU",
    }


# the commands


@pytest.mark.slow
def test_a_command_that_acts_sends_and_status_says_what_is_not_sent(
    run: Run, web: Web, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    tell(run, "${HOOK}")
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    noted(run)
    sent(run)
    assert main(["status", str(run.path)]) == 0
    assert "1 not sent: t0: the environment variable HOOK is not set on " in capsys.readouterr().out
    monkeypatch.setenv("HOOK", f"json://127.0.0.1:{web.port}/hook")

    with monkeypatch.context() as patch:
        patch.setattr(unsent_notices, "_start", lambda *_: pytest.fail("a look sends"))
        main(["logs", str(run.path)])
        main(["status", str(run.path)])

    def told() -> bool:  # the process of the command before may have its turn, without the variable
        main(["stop", str(run.path)])
        return bool(web.requests)

    wait_for(told)
    wait_for(lambda: not notices.pending_notices(run))
    capsys.readouterr()
    assert main(["status", str(run.path), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["unsent_notices"], status["unsent_reason"]) == (0, "")


def test_notify_test_and_send(run: Run, web: Web, capsys: pytest.CaptureFixture[str]) -> None:
    web.answers["/bad"] = (404, b"")
    tell(run, f"json://127.0.0.1:{web.port}/good", f"json://127.0.0.1:{web.port}/bad")
    assert main(["notify", "test", str(run.path)]) == 1
    assert re.fullmatch(r"t0  sent\nt1  NOT SENT: .*error=404\.\n", capsys.readouterr().out)
    assert (
        json.loads(web.requests[0][2])["title"]
        == "[relayrun] tests/history on local: a test: a test: no run has changed"
    )
    web.answers.clear()
    assert main(["notify", "test", str(run.path)]) == 0
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    assert main(["notify", "send", str(run.path)]) == 0
    assert "nothing is left to send" in capsys.readouterr().out
    run.notice_policy.unlink()
    assert main(["notify", "test", str(run.path)]) == 1
    assert "nobody is told of this run" in capsys.readouterr().err


# from end to end, with real jobs of the local scheduler


def wait_until_told(run: Run) -> None:
    """Nothing, where the job had the time; on a busy machine the next command sends what is left."""
    wait_for(lambda: sent(run) == [] and notices.pending_notices(run) == [])


def assert_each_told(mail: Mailbox, *words: str) -> None:
    """Each of these was told, and nothing else. In any order: where the end of a job cuts one message short,
    the others of the job go first."""
    subjects = [str(letter["Subject"]) for letter in mail.letters]
    assert {word for word in words for subject in subjects if word in subject} == set(words), subjects
    assert [subject for subject in subjects if not any(word in subject for word in words)] == []


def chain(run: Run, plan: Plan) -> None:
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})

    def skip_backoff() -> None:
        for path in (run.path / "local").glob("job-*.json"):
            with contextlib.suppress(ValueError):
                job = json.loads(path.read_text())
                if job["state"] == "PENDING" and job["eligible_time"]:
                    path.write_text(json.dumps(job | {"eligible_time": 0}))

    scheduler.run_queue(lambda _event: None, skip_backoff)


@pytest.mark.slow
def test_a_chain_that_stops_sends_one_mail(make_run: MakeRun, mail: Mailbox) -> None:
    run, plan = make_run("--fatal-at=3")
    tell(run, f"mailto://127.0.0.1:{mail.port}?to=ada@example.org&from=runs@example.org", since=time.time())
    chain(run, plan)
    wait_until_told(run)
    (letter,) = mail.letters
    assert letter["Subject"].startswith("[relayrun] tests/history on local: the chain has stopped: fatal: ")
    assert mail.receivers == [["ada@example.org"]]
    assert "attempt:   1, job 1" in letter.get_content()


@pytest.mark.slow
def test_a_stop_of_the_batch_script_is_told_by_the_job_itself(make_run: MakeRun, mail: Mailbox, tmp_path: Path) -> None:
    """Its supervisor does not start, so no Python has written the reason."""
    python = refusing_python(tmp_path, "begin", times=99)
    run, plan = make_run(host_python=python, auto_requeue=False)
    tell(run, f"mailto://127.0.0.1:{mail.port}?to=ada@example.org&from=runs@example.org", since=time.time() - 1)
    chain(run, plan)
    wait_until_told(run)
    (letter,) = mail.letters
    assert "the chain has stopped: begin failed in job 1 on " in letter["Subject"]


@pytest.mark.slow
def test_a_hang_and_a_done_run_are_told(make_run: MakeRun, mail: Mailbox) -> None:
    run, plan = make_run("--steps=6", total_steps=6)
    tell(run, f"mailto://127.0.0.1:{mail.port}?to=ada@example.org&from=runs@example.org", since=time.time() - 1)
    began(run, 1, base=0)
    Hang(iteration=2, phase="step", seconds=300.0, silent=[1], time=time.time()).write(run.attempt(1).hang)
    chain(run, plan)  # its first job closes the attempt that a kill left open
    wait_until_told(run)
    assert_each_told(mail, "hang: no progress", "done")


@pytest.mark.slow
@pytest.mark.long
def test_ranks_that_hang_are_told(make_run: MakeRun, mail: Mailbox) -> None:
    run, plan = make_run(
        "--stop-at=3", "--stop-rank=1", hang_timeout=3, start_timeout=60, max_failed_attempts=2, time_limit=300
    )
    tell(run, f"mailto://127.0.0.1:{mail.port}?to=ada@example.org&from=runs@example.org", since=time.time() - 1)
    chain(run, plan)
    wait_until_told(run)
    assert_each_told(mail, "hung", "has stopped")
    assert any("ranks 1 did not answer" in letter.get_content() for letter in mail.letters)
