"""`python -m relayrun.watch.send_notices RUN_DIR`: send the due notices of a run and exit.

One process of a run sends at a time, and only for the owner of the run. It records a message before sending and the
result afterwards: a kill may repeat a message but never loses it. Each target has its own thread, so a slow target does
not delay the others. Uses the standard library alone; apprise is optional (`notice_channels`).
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from relayrun.control.notify import notices
from relayrun.control.notify.notices import MAX_WORDS, NoticeMessage, NoticePolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError
from relayrun.masking import mask_tokens
from relayrun.watch import notice_channels
from relayrun.watch.notice_channels import NoticeSendError
from relayrun.watch.text import format_time

SUBJECT_LENGTH = 160
"""Maximum number of characters of a subject."""
BODY_LENGTH = 1800
"""Maximum number of characters of a body: with the subject below Discord's limit (2000), the smallest of all."""
EVENT_TITLES = {
    "stopped": "the chain has stopped",
    "failed": "attempts fail",
    "hang": "an attempt hung",
    "stalled": "no durable progress",
    "anomaly": "the loss is not as it should be",
    "disk": "the disk is nearly full",
    "node": "a node is sick",
    "done": "done",
    "evaluation": "evaluation",
    "test": "a test",
}
"""Title of a message by event."""

_INVISIBLE = ("Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn")
"""Unicode categories of invisible characters: controls, text direction, separators, unassigned."""
_ACTIVE = str.maketrans({"<": "‹", ">": "›", "`": "'", "@": "(at)", "*": "∗", "~": "∼", "|": "¦", "\\": "/"})
"""Replacements of characters that chats read as a mention, a link or markup."""
SEND_SECONDS = 60.0
"""Time limit of all sending; much less than the time after which another process takes the lock."""
KILL_SECONDS = 90
"""Seconds after which SIGALRM ends the process."""
SendResults = queue.SimpleQueue["_SendResult | None"]
"""Results of sent messages; None asks the process to finish."""


def send_due_notices(
    run: Run, *, job: bool, environment: Mapping[str, str], results: SendResults | None = None
) -> list[str]:
    """Send the due notices; return a line for each failure. `job`: skip targets that failed a moment ago.

    Raises RelayrunError for a damaged run directory, OSError if results cannot be recorded.
    """
    plan, policy = Plan.load(run), notices.read_trusted_notice_policy(run)
    if policy is None or plan.owner != os.geteuid():
        return []
    turn = notices.take_sender_lock(run, now=time.time())
    if turn is None:
        return []
    try:
        return _send_due_notices(run, policy, job=job, environment=environment, results=results or queue.SimpleQueue())
    finally:
        notices.release_sender_lock(turn)


def _send_due_notices(
    run: Run, policy: NoticePolicy, *, job: bool, environment: Mapping[str, str], results: SendResults
) -> list[str]:
    now = time.time()
    targets = policy.every_target()
    waiting = notices.pending_notices(run)
    book = {notice.id: (notice, delivery) for notice, delivery in waiting}
    messages = notices.due_messages(targets, waiting, notices.last_sent_times(run, waiting, now=now), now=now)
    if job:
        messages = [message for message in messages if not notices.must_wait_for_retry(message, waiting, now=now)]
    for message in messages:
        delivery = book[message.notice.id][1]
        delivery.note(message.target.name, "waits", now=now, reason="it was being sent and was cut short", tried=True)
    for notice, delivery in waiting:
        for target in targets:
            if now - notice.time > notices.KEEP_SECONDS and delivery.state(target.name) == "waits":
                delivery.note(target.name, "old", now=now, reason=delivery.reason(target.name))
        notices.record_delivery(run, notice, delivery, targets)  # before sending, or a full disk would repeat it
    failed = []
    for result in _send_all(policy, messages, environment, results):
        message, name = result.message, result.message.target.name
        if result.error is not None:
            book[message.notice.id][1].note(name, "waits", now=time.time(), reason=result.error)
            failed.append(f"{name}: {result.error}")
        for each in message.settles:
            if result.error is None:
                book[each][1].note(name, "sent" if each == message.notice.id else "counted", now=time.time())
            notices.record_delivery(run, *book[each], targets)
    notices.remove_old_notices(run)
    return failed


@dataclass(frozen=True)
class _SendResult:
    message: NoticeMessage
    error: str | None


def _send_all(
    policy: NoticePolicy, messages: list[NoticeMessage], environment: Mapping[str, str], results: SendResults
) -> Iterator[_SendResult]:
    """Send the messages, each target's in order; yield each result as soon as it is known."""
    left = {id(message): message for message in messages}
    for name in {message.target.name for message in messages}:
        own = [message for message in messages if message.target.name == name]
        threading.Thread(target=_send_to_one, args=(policy, own, environment, results), daemon=True).start()
    until = time.monotonic() + SEND_SECONDS
    why = f"no answer within {SEND_SECONDS:.0f} s"
    while left:
        try:
            result = results.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
        if result is None:
            why = "no answer before the job ended"
            break
        del left[id(result.message)]
        yield result
    yield from [_SendResult(message, why) for message in left.values()]


def _send_to_one(
    policy: NoticePolicy, messages: list[NoticeMessage], environment: Mapping[str, str], results: SendResults
) -> None:
    error: str | None = None
    for message in messages:
        if error is None:
            error = send_message(policy, message, environment)
        results.put(_SendResult(message, error))


def send_message(policy: NoticePolicy, message: NoticeMessage, environment: Mapping[str, str]) -> str | None:
    """Send one message; return the reason of a failure, None if it was sent."""
    subject, body, event = message_subject(policy, message), message_body(policy, message), message.notice.event
    try:
        notice_channels.send_to_target(message.target, subject, body, event=event, environment=environment)
    except NoticeSendError as error:
        return str(error)
    return None


def message_subject(policy: NoticePolicy, message: NoticeMessage) -> str:
    """Return the subject: run, cluster and event."""
    notice = message.notice
    what = f"{policy.run} on {policy.cluster}: {EVENT_TITLES.get(notice.event, notice.event)}"
    return one_line(f"[relayrun] {what}: {notice.reason}", SUBJECT_LENGTH)


def message_body(policy: NoticePolicy, message: NoticeMessage) -> str:
    """Return the body: the event, the state of the run, and the command to continue."""
    notice, since = message.notice, format_time(message.since, zone=True)
    facts = [
        ("what", notice.reason),
        ("run", f"{policy.run} on {policy.cluster}"),
        ("when", format_time(notice.time, zone=True)),
        ("more", f"{message.count - 1} more since {since}" if message.count > 1 else ""),
        ("attempt", _joined(notice.attempt, f"job {notice.job_id}" if notice.job_id else "", notice.nodes)),
        ("iteration", f"{notice.iteration} of {notice.total_steps}" if notice.iteration is not None else ""),
        ("durable", f"iteration {notice.durable_iteration}" if notice.durable_iteration is not None else ""),
        ("go on", notice.go_on or ""),
        ("log", notice.log or ""),
    ]
    lines = [f"{name + ':':<11}{one_line(text, 700)}" for name, text in facts if text]
    text = "\n".join(lines)
    if notice.words:
        text += "\n\n" + plain_text(notice.words[:MAX_WORDS])
    return text if len(text) <= BODY_LENGTH else text[: BODY_LENGTH - 4].rstrip() + "\n..."


def one_line(text: str, most: int) -> str:
    """Return a text in one line of at most `most` characters."""
    text = " ".join(plain_text(text).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def plain_text(text: str) -> str:
    """Return a text of a rank or log without control characters, mentions, links and markup.

    Line breaks stay; known forms of tokens are masked.
    """
    text, _ = mask_tokens(text)
    lines = re.split(r"\r\n|[\n\r\v\f\x85\u2028\u2029]", text)
    seen = ["".join(" " if unicodedata.category(c) in _INVISIBLE else c for c in line).rstrip() for line in lines]
    text = "\n".join(seen).translate(_ACTIVE)
    return re.sub(r"\]\s*\(", "] - (", text).replace("://", ": //").replace("__", "_ _")


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part not in (None, ""))


def main() -> int:
    """Send the notices of one run directory."""
    parser = argparse.ArgumentParser(prog="relayrun.watch.send_notices")
    parser.add_argument("run", type=Path)
    parser.add_argument("--job", action="store_true", help="from a job: what failed a moment ago is left alone")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(KILL_SECONDS)
    results: SendResults = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda _number, _frame: results.put(None))
    try:
        failed = send_due_notices(Run(options.run), job=options.job, environment=os.environ, results=results)
    except (RelayrunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for words in failed:
        print(f"not sent: {words}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    notice_channels.end_commands()
    os._exit(code)  # a thread may still wait for a silent target
