"""Notices: the config's rules, the text of a message, one message a cause an hour, and the ways to a person."""

from __future__ import annotations

import json
import sys
import time
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve, yaml_file
from relayrun.config.sections import notify as settings
from relayrun.config.sections.notify import secret_in
from relayrun.control.notify import notices
from relayrun.control.notify.notices import Notice, NoticeDelivery, NoticeMessage, NoticePolicy, NoticeTarget
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import Run, write_stop
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.errors import ConfigError, SchedulerError
from relayrun.submit import policies, submission
from relayrun.watch import send_notices
from relayrun.watch.send_notices import NoticeSendError, expand_variables, remove_secrets
from tests.receivers import Mailbox, Web, web_server
from tests.workspace import Workspace

EVENTS = list(notices.NOTICE_EVENTS)
SECRET = "Zx81k9Qm44tTp0aa7Rw2"


def notice(number: int = 1, **changes: Any) -> Notice:
    values = {"id": f"hang-{number:04}", "event": "hang", "cause": "hang", "time": 1000.0 + number, "reason": "it hung"}
    return Notice(**(values | changes))


def policy(*targets: NoticeTarget, **changes: Any) -> NoticePolicy:
    values = {
        "run": "p/n",
        "cluster": "alps",
        "since": 0.0,
        "targets": [vars(target) for target in targets],
        "failed_attempts": 2,
        "no_progress": 3600.0,
        "disk_checkpoints": 2,
        "program": ["true"],
    }
    return NoticePolicy(**(values | changes))


def send(url: str, *, subject: str = "subject", body: str = "body", **environment: str) -> None:
    target = NoticeTarget(name="t", url=url, events=EVENTS)
    send_notices.send_to_target(target, subject, body, event="hang", environment=environment)


# the config


def test_schema_and_run_directory_know_the_same_events() -> None:
    assert settings.EVENTS == notices.NOTICE_EVENTS == typing.get_args(settings.Event)
    assert set(send_notices.EVENT_TITLES) == {*notices.NOTICE_EVENTS, "test"}


@pytest.mark.parametrize(
    "url",
    [
        "mailto://ada:hunter2@smtp.example.org?to=a@b.org",
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/#general",
        "discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js",
        "https://hooks.slack.com/services/a/b/c",
        "https://hooks.example.org/services/3f8a9c0d1e2b3f4a5b6c7d8e",
        "jsons://example.org/v1/550e8400-e29b-41d4-a716-446655440000",
        "https://example.org/hook?token=abc",
        "matrixs://bot:secret@example.org/#room",
        "tgram://bottoken/ChatID",
        "ntfy://tk_AgQdq7mVBoFD37zQVN29RhuMzNIz2@ntfy.example.org/runs",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    workspace = Workspace(tmp_path)
    told = {"targets": {"team": {"url": url}}}
    for load in (
        lambda: resolve.load_run_config(workspace.config("run", notify=told)),
        lambda: resolve.load_run_config(workspace.config("run"), [f"notify.targets.team.url={url}"]),
        lambda: resolve.load_run_config(workspace.config("run", cluster={"notify": told})),
    ):
        with pytest.raises(ConfigError) as error:
            load()
        assert "notify.targets.team: holds " in str(error.value)
        assert "write ${VARIABLE} for it" in str(error.value)
        assert url not in str(error.value)
        assert url.partition("://")[2][-5:] not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "mailto://smtp.example.org?to=ada@example.org,bob@example.org&from=runs@example.org",
        "mailtos://ada:${MAIL_PASSWORD}@smtp.example.org:587?to=ada@example.org&from=runs@example.org&mode=starttls",
        "${SLACK_WEBHOOK}",
        "https://hooks.slack.com/services/${SLACK_PATH}",
        "slack://${A}/${B}/${C}/#general",
        "ntfy://llama3-8b-v2-run7",
        "json://hooks.example.org:8080/llama3/70b-2026-11/notifications-of-training",
        "matrixs://bot:${MATRIX_PASSWORD}@matrix.example.org/#room",
    ],
)
def test_a_url_without_secrets_is_taken(url: str) -> None:
    assert secret_in(url) is None


def test_a_wrong_target_is_refused_by_name_without_its_value(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    for wrong, words in (
        ({"url": "mailto://a?to=b@c", "command": ["x"]}, "either a url or a command"),
        ({}, "either a url or a command"),
        ({"url": "somebody@example.org"}, "no URL"),
        ({"command": ["tell", f"--password={SECRET}"]}, "every user of the machine can see"),
        ({"url": 7}, "notify.targets.team.url"),
        ({"url": "${A}", "events": ["stoped"]}, "notify.targets.team.events"),
    ):
        with pytest.raises(ConfigError, match=r"notify\.targets\.team") as error:
            resolve.load_run_config(workspace.config("run", notify={"targets": {"team": wrong}}))
        assert words in str(error.value)
        assert SECRET not in str(error.value)


def test_a_site_gives_defaults_and_a_run_adds_to_them(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    site = {"targets": {"ops": {"url": "${OPS}"}, "team": {"url": "${TEAM}"}}, "failed_attempts": 5}
    own = {"targets": {"team": {"url": "${OWN}", "events": ["done"]}}, "no_progress": 60.0}
    path = workspace.config("run", notify=own, cluster={"notify": site})
    config = resolve.load_run_config(path)
    assert {name: target.url for name, target in config.notify.targets.items()} == {"ops": "${OPS}", "team": "${OWN}"}
    assert (config.notify.failed_attempts, config.notify.no_progress) == (5, 60.0)
    assert config.cluster.notify == {}
    with pytest.raises(ConfigError, match=r"run\.yaml:\d+: notify\.failed_attempts"):
        resolve.load_run_config(workspace.config("run", cluster={"notify": site | {"failed_attempts": 0}}))
    targets = {target.name: target for target in policies.make_notice_policy(config).every_target()}
    assert targets["team"].events == ["done"]
    assert targets["ops"].events == EVENTS


def test_the_example_of_the_page_is_a_config(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/notify.md").read_text(encoding="utf-8")
    example = yaml_file.parse_yaml(page.split("```yaml\n")[1].split("```")[0], source="docs/how-to/notify.md")
    config = resolve.load_run_config(Workspace(tmp_path).config("run", notify=example.values["notify"]))
    assert list(config.notify.targets) == ["mail", "team", "pager"]
    for event in settings.EVENTS:
        assert f"| `{event}` |" in page


@pytest.mark.slow
def test_a_submit_says_who_is_told_and_one_that_is_refused_leaves_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace.make(tmp_path)
    run = workspace.run("run")

    def submit(resume: bool = False, **sections: Any) -> None:
        submission.submit_run(resolve.load_run_config(workspace.config("run", **sections)), resume=resume)

    monkeypatch.setattr(LocalScheduler, "submit_first", lambda *_: "1")
    told = {"targets": {"team": {"url": "${TEAM}"}}}
    submit(notify=told)
    first = NoticePolicy.read(run.notice_policy)
    assert first is not None
    assert (first.run, first.cluster, first.every_target()[0].url) == ("tests/tiny", "local", "${TEAM}")
    write_stop(run, ChainEnd("stopped", "stopped by ada"))

    def refused(*_: object) -> str:
        raise SchedulerError("no")

    with monkeypatch.context() as patch:
        patch.setattr(LocalScheduler, "submit_first", refused)
        with pytest.raises(SchedulerError):
            submit(resume=True, notify={"targets": {"other": {"url": "${OTHER}"}}})
    assert NoticePolicy.read(run.notice_policy) == first  # or the stop would be told as another one
    submit(resume=True)
    assert NoticePolicy.read(run.notice_policy) is None


def test_notify_test_of_a_config(tmp_path: Path, web: Web, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"targets": {"team": {"url": f"json://127.0.0.1:{web.port}/x"}, "chat": {"url": "${NO_SUCH_VARIABLE}"}}}
    path = Workspace(tmp_path).config("run", notify=told)
    assert main(["notify", "test", str(path)]) == 1
    team, chat = capsys.readouterr().out.splitlines()
    assert team == "team  sent"
    assert chat.startswith("chat  NOT SENT: the environment variable NO_SUCH_VARIABLE is not set on ")
    assert len(web.requests) == 1
    assert main(["notify", "test", str(Workspace(tmp_path).config("run"))]) == 1
    assert "the config has no notify.targets" in capsys.readouterr().out


# one message a cause an hour


def test_one_message_a_cause_an_hour_and_the_rest_is_counted() -> None:
    target = NoticeTarget(name="t", url="x", events=["hang"])
    waiting = [(notice(n), NoticeDelivery(cause="hang")) for n in range(1, 9)]
    (message,) = notices.due_messages([target], waiting, {}, now=2000.0)
    assert (message.notice.id, message.count, len(message.settles)) == ("hang-0008", 8, 8)
    assert "7 more since" in send_notices.message_body(policy(target), message)
    assert notices.due_messages([target], waiting, {("t", "hang"): 2000.0}, now=2000.0 + 3599) == []
    assert len(notices.due_messages([target], waiting, {("t", "hang"): 2000.0}, now=2000.0 + 3600)) == 1
    other = (notice(9, id="hang-other", cause="another"), NoticeDelivery(cause="another"))
    assert len(notices.due_messages([target], [*waiting, other], {("t", "hang"): 2000.0}, now=2001.0)) == 1


def test_a_target_is_told_of_its_events_alone_and_of_nothing_that_is_a_week_old() -> None:
    targets = [NoticeTarget(name="a", url="x", events=["hang"]), NoticeTarget(name="b", url="x", events=["done"])]
    waiting = [(notice(), NoticeDelivery(cause="hang"))]
    assert [message.target.name for message in notices.due_messages(targets, waiting, {}, now=2000.0)] == ["a"]
    assert notices.due_messages(targets, waiting, {}, now=2000.0 + notices.KEEP_SECONDS) == []


def test_a_failed_try_is_left_alone_for_longer_and_longer() -> None:
    target = NoticeTarget(name="t", url="x", events=["hang"])
    delivery = NoticeDelivery(cause="hang")
    waiting = [(notice(), delivery)]
    (message,) = notices.due_messages([target], waiting, {}, now=2000.0)
    assert not notices.must_wait_for_retry(message, waiting, now=2000.0)
    for pause in (60, 120, 240, 480, 960, 1920, 3600, 3600):
        delivery.note("t", "waits", now=2000.0, reason="away", tried=True)
        assert notices.must_wait_for_retry(message, waiting, now=2000.0 + pause - 1)
        assert not notices.must_wait_for_retry(message, waiting, now=2000.0 + pause)


def test_one_process_at_a_time_has_its_turn(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.notices.mkdir()
    first = notices.take_sender_lock(run, now=1000.0)
    assert first is not None
    assert notices.take_sender_lock(run, now=1000.0 + notices.SENDER_LOCK_SECONDS - 1) is None
    second = notices.take_sender_lock(run, now=1000.0 + notices.SENDER_LOCK_SECONDS + 1)  # the first was killed
    assert second is not None
    assert not first.exists()
    notices.release_sender_lock(second)
    third = notices.take_sender_lock(run, now=1000.0 + notices.SENDER_LOCK_SECONDS + 1)
    assert third is not None
    assert sorted(path.name for path in run.notices.iterdir()) == [third.name]


def test_who_read_an_old_state_does_not_take_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the file of its own, another process takes a turn, and the next one too."""
    run = Run(tmp_path)
    run.notices.mkdir()
    one = notices.take_sender_lock(run, now=1.0)
    assert one is not None
    notices.release_sender_lock(one)
    listed = notices._sender_locks

    def late(of: Run) -> list[Path]:
        found = listed(of)
        monkeypatch.setattr(notices, "_sender_locks", listed)
        for _ in range(2):
            turn = notices.take_sender_lock(of, now=2.0)
            assert turn is not None
            notices.release_sender_lock(turn)
        notices.take_sender_lock(of, now=2.0)
        return found

    monkeypatch.setattr(notices, "_sender_locks", late)
    assert notices.take_sender_lock(run, now=2.0) is None


def test_a_run_has_no_end_of_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "MAX_NOTICES", 5)
    monkeypatch.setattr(notices, "MAX_SENT_NOTICES", 2)
    run = Run(tmp_path)
    run.notices.mkdir()
    for number in range(8):
        notices.add_notice(run, notice(number, reason="x" * 9000), notices.known_notices(run))
    waiting = notices.pending_notices(run)
    assert len(waiting) == 5
    assert {len(entry.reason) for entry, _ in waiting} == {notices.MAX_WORDS}
    for entry, delivery in waiting:
        notices.record_delivery(run, entry, delivery, [])
    assert notices.pending_notices(run) == []
    notices.remove_old_notices(run)
    assert len(notices.known_notices(run)) == 2


# the text


def test_the_text_says_what_happened_and_what_to_do() -> None:
    told = notice(
        event="stopped",
        reason="3 attempts in a row without a new checkpoint",
        attempt=7,
        job_id="4711",
        nodes="n[1-4]",
        iteration=900,
        total_steps=5000,
        durable_iteration=800,
        log="/runs/logs/x-4711.err",
        go_on="relayrun resume /runs/x",
        words="The last lines of its log:\nKeyError: 'layout'",
    )
    message = NoticeMessage(target=NoticeTarget(name="t"), notice=told, settles=[], count=1, since=1.0)
    assert send_notices.message_subject(policy(), message) == (
        "[relayrun] p/n on alps: the chain has stopped: 3 attempts in a row without a new checkpoint"
    )
    body = send_notices.message_body(policy(), message)
    for words in (
        "attempt:   7, job 4711, n[1-4]",
        "iteration: 900 of 5000",
        "saved:     iteration 800",
        "go on:     relayrun resume /runs/x",
        "log:       /runs/logs/x-4711.err",
        "KeyError: 'layout'",
    ):
        assert words in body


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mred\x07\x00", "a [31mred"),
        ("<!channel> <@U123> @everyone", "‹!channel› ‹(at)U123› (at)everyone"),
        ("[click](https://evil.example)", "[click] - (https: //evil.example)"),
        ("`code` **bold** __x__ ~~y~~ a|b", "'code' ∗∗bold∗∗ _ _x_ _ ∼∼y∼∼ a¦b"),
        ("abc\u202edcba\u200b!", "abc dcba !"),
        ("one\r\ntwo\u2028three", "one\ntwo\nthree"),
        ("token ghp_" + "a" * 36, "token ‹GitHub token›"),
    ],
)
def test_what_a_rank_wrote_does_nothing_where_it_is_shown(text: str, shown: str) -> None:
    assert send_notices.plain_text(text) == shown


def test_a_message_is_short_whatever_a_rank_wrote() -> None:
    told = notice(reason="x" * 3000 + "\nSubject: other", words="y\n" * 100_000)
    message = NoticeMessage(target=NoticeTarget(name="t"), notice=told, settles=[], count=1, since=1.0)
    assert len(send_notices.message_subject(policy(), message)) <= send_notices.SUBJECT_LENGTH
    assert "\n" not in send_notices.message_subject(policy(), message)
    assert len(send_notices.message_body(policy(), message)) <= send_notices.BODY_LENGTH


# the ways to a person


def test_mail(mail: Mailbox) -> None:
    body = "a line\n.\n.hidden\n" + "é" * 2000
    send(f"mailto://127.0.0.1:{mail.port}?to=ada@example.org,bob@example.org&from=runs@example.org", body=body)
    assert mail.receivers == [["ada@example.org"], ["bob@example.org"]]
    for letter in mail.letters:
        assert (letter["Subject"], letter["From"]) == ("subject", "runs@example.org")
        assert letter.get_content_type() == "text/plain"
        assert letter.get_content().splitlines() == body.split("\n")


def test_mail_without_a_sender_is_refused_with_the_reason(mail: Mailbox) -> None:
    with pytest.raises(NoticeSendError, match="apprise does not take this mailto URL: Invalid ~From~ email specified"):
        send(f"mailto://127.0.0.1:{mail.port}?to=ada@example.org")
    assert mail.letters == []


def test_webhook(web: Web) -> None:
    send(f"json://127.0.0.1:{web.port}/hooks/${{PATH_OF_HOOK}}?-x=1", PATH_OF_HOOK=SECRET)
    send(f"json://127.0.0.1:{web.port}/hooks/", subject="[a] b: c", body="one\ntwo & <three>")
    ((method, path, content), (_, _, other)) = web.requests
    assert (method, path) == ("POST", f"/hooks/{SECRET}?x=1")
    assert json.loads(content).items() >= {"title": "subject", "message": "body", "event": "hang"}.items()
    assert json.loads(other).items() >= {"title": "[a] b: c", "message": "one\ntwo & <three>"}.items()


@pytest.mark.parametrize(("code", "reason"), [(500, "error=500"), (302, "error=302")])
def test_a_webhook_that_refuses_or_points_elsewhere(web: Web, code: int, reason: str) -> None:
    web.answers["/"] = code, b""
    with pytest.raises(NoticeSendError, match=reason):
        send(f"json://127.0.0.1:{web.port}/a")
    assert [path for _, path, _ in web.requests] == ["/a"]


def test_what_apprise_does_not_take_is_refused_and_not_repeated() -> None:
    with pytest.raises(NoticeSendError, match="apprise does not take this https URL") as error:
        send("https://example.org/${S}", S=SECRET)
    assert SECRET not in str(error.value)


def test_a_command_reads_the_message_and_has_nothing_in_its_arguments(tmp_path: Path) -> None:
    program = tmp_path / "tell"
    program.write_text(f'#!/bin/bash\n{{ echo "$RELAYRUN_EVENT $*"; cat; }} >"{tmp_path}/told"\n')
    program.chmod(0o755)
    target = NoticeTarget(name="t", command=[str(program), "--urgent"], events=EVENTS)
    send_notices.send_to_target(target, "subject", "body", event="hang", environment={})
    assert (tmp_path / "told").read_text() == "hang --urgent\nsubject\n\nbody\n"


def test_a_command_that_fails_or_hangs_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_notices, "ANSWER_SECONDS", 0.5)

    def run(*command: str) -> None:
        target = NoticeTarget(name="t", command=list(command))
        send_notices.send_to_target(target, "s", "b", event="hang", environment={})

    with pytest.raises(NoticeSendError, match=r"/bin/sh ended with exit code 3: no way"):
        run("/bin/sh", "-c", "echo no way; exit 3")
    with pytest.raises(NoticeSendError, match=r"/bin/sh did not end within 0 s"):
        run("/bin/sh", "-c", "sleep 60 & sleep 60")
    with pytest.raises(NoticeSendError, match="No such file"):
        run("/no/such/program")


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(NoticeSendError, match="the environment variable SLACK_WEBHOOK is not set on "):
        send("${SLACK_WEBHOOK}")


def test_a_password_with_special_characters_is_quoted_and_a_whole_url_is_not() -> None:
    assert expand_variables("mailto://a:${PW}@h?to=x@y", {"PW": "p@/s:s"}) == "mailto://a:p%40%2Fs%3As@h?to=x@y"
    assert expand_variables("${URL}", {"URL": "https://h/a?b=c\n"}) == "https://h/a?b=c"


def test_no_reason_holds_the_value_of_a_variable() -> None:
    target = NoticeTarget(name="t", url="https://h/${HOOK}/${PW}")
    environment = {"HOOK": f"https://x.org/{SECRET}/T0AB1CD2", "PW": "p@ss word"}
    told = remove_secrets(f"no /{SECRET} T0AB1CD2 p%40ss%20word p@ss word at all", target, environment)
    for part in (SECRET, "T0AB1CD2", "p%40ss", "p@ss"):
        assert part not in told


def test_an_address_that_nobody_answers_is_a_reason_without_secrets(web: Web) -> None:
    gone = web.port
    with web_server() as other:
        gone = other.port
    for url in (f"json://127.0.0.1:{gone}/${{S}}", f"mailto://u:${{S}}@127.0.0.1:{gone}?to=a@b.org&from=a@b.org"):
        with pytest.raises(NoticeSendError) as error:
            send(url, S=SECRET)
        assert "refused" in str(error.value)
        assert SECRET not in str(error.value)


# what apprise knows


@pytest.mark.slow
def test_ntfy(web: Web) -> None:
    send(f"ntfy://127.0.0.1:{web.port}/my-runs")
    (content,) = [json.loads(content) for _, _, content in web.requests]
    assert (content["topic"], content["title"], content["message"]) == ("my-runs", "subject", "body")


@pytest.mark.slow
def test_matrix(web: Web) -> None:
    web.answers["/_matrix/client/v3/login"] = (200, b'{"access_token": "t0", "home_server": "h", "user_id": "@bot:h"}')
    web.answers["/_matrix/client/v3/join"] = (200, b'{"room_id": "!room:h"}')
    send(f"matrix://bot:${{PW}}@127.0.0.1:{web.port}/!room:h?version=3", PW=SECRET)
    login = next(content for _, path, content in web.requests if path.endswith("/login"))
    assert json.loads(login)["password"] == SECRET
    sent = [json.loads(content) for _, path, content in web.requests if "/send/m.room.message" in path]
    assert len(sent) == 1
    assert "subject" in sent[0]["body"]
    assert "body" in sent[0]["body"]


ENVIRONMENT = {
    "A": "T1JJ3T3L2",
    "B": "A1BRTD4JD",
    "C": "TIiajkdnlazkcOXrIdevi7FQ",
    "D": "417421629812345678",
    "E": "JHMHI8qBe7bk2ZwO5U711o3dV_jsJHMHI8",
    "SLACK": "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
    "DISCORD": "https://discord.com/api/webhooks/417421629812345678/JHMHI8qBe7bk2ZwO5U711o3dV_jsJHMHI8",
}


@pytest.mark.parametrize("url", ["slack://${A}/${B}/${C}/#runs", "${SLACK}", "discord://${D}/${E}", "${DISCORD}"])
def test_slack_and_discord_get_the_request_that_they_want(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """With apprise's way to the network replaced: address and content are compared."""
    import requests

    asked: list[tuple[str, dict[str, Any]]] = []

    def post(address: str, data: str = "", **_: Any) -> requests.Response:
        asked.append((address, json.loads(data)))
        answer = requests.Response()
        answer.status_code = 200
        answer._content = b"ok"
        return answer

    monkeypatch.setattr(requests, "post", post)
    monkeypatch.setattr(requests, "request", lambda _method, address, **more: post(address, **more))
    send(url, subject="[relayrun] p/n: it stopped", body="what:   it broke & so on\nlog:    /x/y_z.err", **ENVIRONMENT)
    ((address, content),) = asked
    if "slack" in url.lower():
        assert address == ENVIRONMENT["SLACK"]
        (attachment,) = content["attachments"]
        assert (content["mrkdwn"], content.get("channel")) == (False, "#runs" if "#" in url else None)
        assert attachment["title"] == "[relayrun] p/n: it stopped"
        assert attachment["text"] == "what:   it broke &amp; so on\nlog:    /x/y_z.err"
    else:
        assert address == ENVIRONMENT["DISCORD"]
        assert content["content"] == "[relayrun] p/n: it stopped\r\nwhat:   it broke & so on\nlog:    /x/y_z.err"


def test_without_apprise_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    for scheme in ("ntfy", "json", "mailto"):
        with pytest.raises(
            NoticeSendError, match=f"{scheme} needs apprise, which this Python lacks; install relayrun's"
        ):
            send(f"{scheme}://127.0.0.1:1/x")


def test_a_damaged_record_of_a_delivery_is_begun_anew(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.notices.mkdir()
    notices.add_notice(run, notice(time=time.time()), {})
    (run.notices / "hang-0001.tried").write_text("{")
    ((entry, delivery),) = notices.pending_notices(run)
    assert replace(entry, time=0.0) == notice(time=0.0)
    assert delivery.tries("t") == 0
