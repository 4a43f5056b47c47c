"""Somebody is told: from the records of a run to a message on loopback, and what a kill, a full disk, a silent receiver
or another process that sends cannot lose, double or hold up."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.control.chain import background, supervisor
from relayrun.control.chain.background import NoticeSender
from relayrun.control.notify import notices
from relayrun.control.notify.events import write_due_notices
from relayrun.control.notify.notices import NoticePolicy, NoticeTarget
from relayrun.control.rundir.evaluations import EvaluationResult
from relayrun.control.rundir.node_health import HealthFinding
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, ChainEnd, Hang
from relayrun.control.rundir.restarts import Rollback
from relayrun.control.rundir.run import Run, write_stop
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.errors import RunDirError
from relayrun.files import append_line
from relayrun.watch import send_notices, unsent_notices
from tests.history import STEP, began
from tests.owners import give_away
from tests.receivers import Mailbox, Web
from tests.waiting import wait_for

from .conftest import MakeRun
from .test_again import refusing_python


def tell(run: Run, *urls: str, events: tuple[str, ...] = notices.NOTICE_EVENTS, **changes: Any) -> NoticePolicy:
    """Who is told of a run from now on."""
    values: dict[str, Any] = {
        "run": "tests/history",
        "cluster": "local",
        "since": 5.0,
        "targets": [vars(NoticeTarget(name=f"t{n}", url=url, events=list(events))) for n, url in enumerate(urls)],
        "failed_attempts": 2,
        "no_progress": 1e9,
        "disk_checkpoints": 2,
        "program": [sys.executable, "-m", "relayrun.watch.send_notices"],
    }
    policy = NoticePolicy(**(values | changes))
    notices.write_notice_policy(run, policy)
    return policy


def noted(run: Run, *, now: float | None = None) -> dict[str, str]:
    """Notices that follow from the records now: reason by id."""
    policy = NoticePolicy.read(run.notice_policy)
    assert policy is not None
    assert write_due_notices(run, Plan.load(run), policy, now=now or time.time(), at_work=True) == []
    return {entry.id: entry.reason for entry, _ in notices.pending_notices(run)}


def end(run: Run, number: int, cause: str, *, progress: bool = False, action: str = "retry", when: float = 1e9) -> None:
    if not run.attempt(number).begin.exists():
        began(run, number, base=300)
    AttemptEnd(
        attempt=number,
        cause=cause,
        reason=f"{cause}, it says",
        exit_code=1,
        durable_iteration=300,
        progress=progress,
        end_time=when,
        action=action,
        chain_end="failed" if action == "stop" else None,
    ).write(run.attempt(number).end)


def sent(run: Run, **environment: str) -> list[str]:
    """Send what is due; what could not be sent."""
    return send_notices.send_due_notices(run, job=False, environment=environment)


def states(run: Run) -> dict[str, list[str]]:
    """By notice, what became of it at each target."""
    found = {}
    for path in sorted([*run.notices.glob("*.told"), *run.notices.glob("*.tried")]):
        targets = json.loads(path.read_text())["targets"]
        found[path.name] = [targets[name]["state"] for name in sorted(targets)]
    return found


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


# nothing is lost, doubled or held up


def test_a_full_disk_stops_nothing_and_the_notice_comes_later(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tell(run, "json://x/")
    write_stop(run, ChainEnd("failed", "fatal: it broke"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(notices.Notice, "write", full)
        assert write_due_notices(run, Plan.load(run), policy, now=1.0, at_work=True) == [
            "OSError: [Errno 28] No space left on device"
        ]
        background.send_notices(run, Plan.load(run))
    assert len(noted(run)) == 1


@pytest.mark.parametrize("damage", ["{", "[]", '{"run": 1}', '{"targets": [7]}'])
def test_a_damaged_policy_ends_no_job(run: Run, damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    policy = tell(run, "json://x/")
    if damage.startswith('{"targets'):
        damage = json.dumps(vars(policy) | json.loads(damage))
    run.notice_policy.write_text(damage)
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    assert supervisor.begin_attempt(run) == supervisor.EXIT_CHAIN_ENDS
    assert "notices: left for later" in capfd.readouterr().err
    count, reason = unsent_notices.count_unsent(run, now=time.time())
    assert (count, reason.startswith("unknown: ")) == (0, True)
    unsent_notices.send_in_background(run)


def test_what_cannot_be_recorded_is_not_sent(run: Run, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a full disk would have it sent every minute."""
    tell(run, f"json://127.0.0.1:{web.port}/")
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    noted(run)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(notices.NoticeDelivery, "write", full)
        with pytest.raises(OSError, match="No space"):
            sent(run)
    assert web.requests == []
    assert sent(run) == []
    assert len(web.requests) == 1


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_kill_around_the_sending_loses_nothing(run: Run, web: Web, when: str) -> None:
    """Killed before it is sent it comes once; killed before that is recorded it comes twice."""
    tell(run, f"json://127.0.0.1:{web.port}/")
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    noted(run)
    program = f"""
import os, sys
from pathlib import Path
from relayrun.control.rundir.run import Run
from relayrun.watch import send_notices
send = send_notices.send_to_target
def cut(*arguments, **more):
    if {when == "behind"!r}:
        send(*arguments, **more)
    os.kill(os.getpid(), 9)
send_notices.send_to_target = cut
send_notices.send_due_notices(Run(Path(sys.argv[1])), job=False, environment={{}})
"""
    killed = subprocess.run([sys.executable, "-c", program, str(run.path)], check=False, timeout=600)
    assert killed.returncode == -signal.SIGKILL
    assert len(web.requests) == (when == "behind")
    assert sent(run) == []  # it may still be the other one's turn
    assert len(web.requests) == (when == "behind")
    count, reason = unsent_notices.count_unsent(run, now=time.time())
    assert (count, reason) == (1, "t0: it was being sent and was cut short")
    for turn in run.notices.glob("sender-*"):
        turn.write_text(json.dumps({"time": time.time() - notices.SENDER_LOCK_SECONDS - 1}))
    assert sent(run) == []
    assert len(web.requests) == 1 + (when == "behind")
    assert unsent_notices.count_unsent(run, now=time.time()) == (0, "")


@pytest.mark.slow
def test_two_processes_do_not_send_the_same(run: Run, web: Web) -> None:
    tell(run, f"json://127.0.0.1:{web.port}/")
    for number in range(4, 8):
        end(run, number, "failed", when=time.time())
        noted(run)
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    noted(run)
    command = [sys.executable, "-m", "relayrun.watch.send_notices", str(run.path)]
    for process in [subprocess.Popen(command) for _ in range(3)]:
        process.wait(300)
    assert sorted(json.loads(content)["event"] for _, _, content in web.requests) == ["failed", "stopped"]


@pytest.mark.slow
def test_a_receiver_that_is_silent_does_not_hold_the_end_of_a_job(
    run: Run, web: Web, mail: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are told meanwhile; what was not sent stays for the next command, with the reason."""
    monkeypatch.setattr(background, "TERMINATE_SECONDS", 60.0)  # here a process may be slow for other reasons
    silent = f"json://127.0.0.1:{web.port}/?rto=600"
    tell(run, silent, f"mailto://127.0.0.1:{mail.port}?to=ada@example.org&from=runs@example.org")
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    web.silent.set()
    told = NoticeSender(run, Plan.load(run))
    told.attend()
    wait_for(lambda: bool(web.requests) and list(states(run).values()) == [["waits", "sent"]])
    told.finish(0.1)
    assert len(mail.letters) == 1
    assert unsent_notices.count_unsent(run, now=time.time()) == (1, "t0: no answer before the job ended")
    assert all(b"time" not in turn.read_bytes() for turn in run.notices.glob("sender-*"))
    web.silent.clear()
    assert sent(run) == []
    assert [json.loads(content)["event"] for _, _, content in web.requests] == ["stopped"] * 2
    assert len(mail.letters) == 1


@pytest.mark.slow
def test_the_end_of_a_job_waits_for_its_seconds_and_no_longer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the process that sends does: this one takes no notice of SIGTERM."""
    monkeypatch.setattr(background, "NOTICES_END_SECONDS", 0.5)
    monkeypatch.setattr(background, "TERMINATE_SECONDS", 0.1)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    tell(run, "json://127.0.0.1:1/", program=[sys.executable, "-c", stubborn])
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    began_at = time.monotonic()
    background.send_notices(run, Plan.load(run))
    assert 0.5 <= time.monotonic() - began_at < 300
    assert len(notices.pending_notices(run)) == 1


def test_one_target_that_fails_keeps_nothing_from_another(run: Run, web: Web) -> None:
    web.answers["/bad"] = (503, b"")
    tell(run, f"json://127.0.0.1:{web.port}/bad", f"json://127.0.0.1:{web.port}/good", "${SLACK_WEBHOOK}")
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    noted(run)
    failed = sent(run)
    assert re.fullmatch(r"t0: .*error=503\.", sorted(failed)[0])
    assert sorted(failed)[1].startswith("t2: the environment variable SLACK_WEBHOOK is not set on ")
    web.answers.clear()
    assert sent(run, SLACK_WEBHOOK=f"json://127.0.0.1:{web.port}/slack") == []
    assert sorted(path for _, path, _ in web.requests) == ["/bad", "/bad", "/good", "/slack"]


def test_what_comes_in_the_quiet_hour_is_told_as_a_number(run: Run, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(run, f"json://127.0.0.1:{web.port}/", events=("failed",), failed_attempts=1)
    for number in range(4, 13):
        end(run, number, "failed", when=time.time())
        noted(run)
        assert sent(run) == []
    assert len(web.requests) == 1
    assert unsent_notices.count_unsent(run, now=time.time())[0] == 0  # nobody should have been told by now
    monkeypatch.setattr(notices, "QUIET_SECONDS", 0.0)
    assert sent(run) == []
    assert "7 more since" in json.loads(web.requests[1][2])["message"]
    assert set(map(tuple, states(run).values())) == {("sent",), ("counted",)}


def test_another_users_run_is_left_alone(run: Run, web: Web) -> None:
    tell(run, f"json://127.0.0.1:{web.port}/")
    replace(Plan.load(run), owner=os.geteuid() + 1).write(run.plan)
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    unsent_notices.send_in_background(run)
    assert sent(run) == []
    assert noted(run) != {}  # for its owner
    assert web.requests == []


@pytest.mark.parametrize("whose", ["", "plan.json", "notices/policy.json"])
def test_a_look_at_another_users_run_starts_and_sends_nothing_whatever_its_plan_says(
    run: Run, web: Web, whose: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tell(run, f"json://127.0.0.1:{web.port}/", program=["/bin/sh", "-c", f"touch {run.path}/ran"])
    replace(Plan.load(run), owner=None).write(run.plan)
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    noted(run)
    started: list[object] = []
    monkeypatch.setattr(unsent_notices, "_start", lambda *given: started.append(given))
    with monkeypatch.context() as patch:
        give_away(patch, run.path / whose)
        unsent_notices.send_in_background(run)
        assert started == []
        with contextlib.suppress(RunDirError):
            sent(run)
        assert web.requests == []
    with monkeypatch.context() as patch:
        give_away(patch, run.path / "notices/policy.json")
        background.send_notices(run, Plan.load(run))
        assert not (run.path / "ran").exists()
        assert "this belongs to" in capfd.readouterr().err
        for verb in ("test", "send"):
            assert main(["notify", verb, str(run.path)]) == 1
            assert "this belongs to" in capfd.readouterr().err
        assert web.requests == []
    unsent_notices.send_in_background(run)
    assert len(started) == 1
    assert sent(run) == []
    assert len(web.requests) == 1


@pytest.mark.parametrize("name", ["plan.json", "notices/policy.json"])
def test_a_link_in_the_place_of_a_file_that_names_programs_starts_nothing(
    run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `cp -rs` of another user's run makes them; the file behind it may be this user's."""
    tell(run, "json://127.0.0.1:9/", program=["/bin/sh", "-c", f"touch {run.path}/ran"])
    replace(Plan.load(run), owner=None).write(run.plan)
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    noted(run)
    (theirs := tmp_path / "theirs").write_bytes((run.path / name).read_bytes())
    (run.path / name).unlink()
    (run.path / name).symlink_to(theirs)
    started: list[object] = []
    monkeypatch.setattr(unsent_notices, "_start", lambda *given: started.append(given))
    unsent_notices.send_in_background(run)
    assert started == []
    (run.path / name).unlink()
    theirs.rename(run.path / name)
    unsent_notices.send_in_background(run)
    assert len(started) == 1


def test_nothing_secret_is_in_a_file_or_in_the_arguments_of_a_process(
    run: Run, web: Web, mail: Mailbox, tmp_path: Path
) -> None:
    secret = "Zx81k9Qm44tTp0aa7Rw2"
    seen = tmp_path / "ps"
    program = tmp_path / "tell"
    program.write_text(f'#!/bin/bash\ncat /proc/*/cmdline 2>/dev/null | tr "\\0" " " >"{seen}"\nexit 1\n')
    program.chmod(0o755)
    policy = tell(
        run,
        f"json://127.0.0.1:{web.port}/${{HOOK}}",
        f"mailto://ada:${{HOOK}}@127.0.0.1:{mail.port}?to=a@b.org&from=a@b.org",
    )
    command = vars(NoticeTarget(name="t9", command=[str(program)], events=["stopped"]))
    notices.write_notice_policy(run, replace(policy, targets=[*policy.targets, command]))
    web.answers["/"] = (403, f"no {secret}".encode())
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOOK", secret)
        background.send_notices(run, Plan.load(run))
    assert web.requests[0][1] == f"/{secret}"
    assert list(states(run).values()) == [["waits"] * 3]
    assert "relayrun.watch.send_notices" in seen.read_text()
    assert secret not in seen.read_text()
    for path in run.path.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_a_python_that_is_not_there_is_replaced_by_the_batch_scripts(run: Run, web: Web) -> None:
    policy = tell(
        run, f"json://127.0.0.1:{web.port}/", program=["/no/such/python", "-m", "relayrun.watch.send_notices"]
    )
    assert policy.program[0] == "/no/such/python"
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    background.send_notices(run, Plan.load(run))
    assert len(web.requests) == 1


def test_a_command_needs_the_standard_library_alone_and_urls_say_what_they_need(run: Run, tmp_path: Path) -> None:
    command = vars(NoticeTarget(name="t1", command=["/bin/sh", "-c", f"cat >{tmp_path}/told"], events=["stopped"]))
    policy = tell(run, "json://127.0.0.1:9/")
    notices.write_notice_policy(run, replace(policy, targets=[*policy.targets, command]))
    write_stop(run, ChainEnd("failed", "fatal: it broke"))
    noted(run)
    bare = subprocess.run(
        [sys.executable, "-S", "-m", "relayrun.watch.send_notices", str(run.path)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        timeout=600,
    )
    assert bare.returncode == 1
    assert "the chain has stopped: fatal: it broke" in (tmp_path / "told").read_text()
    assert "t0: json needs apprise, which this Python lacks; install relayrun's extra `notify`" in bare.stderr
    assert list(states(run).values()) == [["waits", "sent"]]


def test_a_job_looks_once_a_minute(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    told = NoticeSender(run, Plan.load(run))
    monkeypatch.setattr(NoticeSender, "attend", lambda self: looked.append(self))
    for _ in range(3):
        told.look()
    assert len(looked) == 1


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
