"""No notice is lost, sent twice, sent for another user, or holds up a job."""

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

import pytest

from relayrun.cli import main
from relayrun.control.chain import background, supervisor
from relayrun.control.chain.background import NoticeSender
from relayrun.control.notify import notices
from relayrun.control.notify.events import write_due_notices
from relayrun.control.notify.notices import NoticeTarget
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import Run, write_stop
from relayrun.errors import RunDirError
from relayrun.watch import unsent_notices
from tests.chain.notice_steps import end, noted, sent, states, tell
from tests.owners import give_away
from tests.receivers import Mailbox, Web
from tests.waiting import wait_for

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
