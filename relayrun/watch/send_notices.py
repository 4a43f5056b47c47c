"""`python -m relayrun.watch.send_notices RUN_DIR`: send the due notices of a run and exit.

One process of a run sends at a time, and only for the owner of the run. It records a message before sending and the
result afterwards: a kill may repeat a message but never loses it. Each target has its own thread, so a slow target does
not delay the others. A command of the user takes the standard library alone; URLs take apprise, which is optional.
Secrets come from the environment when a message is sent, and are removed from every error text.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from relayrun.control.notify import notices
from relayrun.control.notify.notices import MAX_WORDS, NoticeMessage, NoticePolicy, NoticeTarget
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError
from relayrun.masking import mask_tokens
from relayrun.terminal import one_line
from relayrun.watch.text import format_time

ANSWER_SECONDS = 15.0
"""Seconds that a command has to end."""
INSTALL_HINT = "install relayrun's extra `notify` where cluster.python is"

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_commands: set[int] = set()
"""Process groups of running commands."""


class NoticeSendError(Exception):
    """A message was not sent; the text gives the reason and contains no secret."""


def send_to_target(
    target: NoticeTarget, subject: str, body: str, *, event: str, environment: Mapping[str, str]
) -> None:
    """Send one message. Raises NoticeSendError."""
    with _explaining(target, environment):
        if target.command:
            _send_to_command(target.command, subject, body, event, environment)
        else:
            _send_by_apprise(expand_variables(target.url or "", environment), subject, body, event)


def check_target(target: NoticeTarget, environment: Mapping[str, str]) -> None:
    """Raise NoticeSendError if apprise is not installed or does not take the target's URL. Nothing is sent."""
    with _explaining(target, environment):
        _apprise_sender(expand_variables(target.url or "", environment))


@contextlib.contextmanager
def _explaining(target: NoticeTarget, environment: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # also any error of a library
        kind = "" if isinstance(error, NoticeSendError) else type(error).__name__
        words = ": ".join(filter(None, (kind, str(error))))
        raise NoticeSendError(remove_secrets(words, target, environment)) from None


def expand_variables(url: str, environment: Mapping[str, str]) -> str:
    """Replace each `${VARIABLE}` of a URL, quoted in the user's part. Raises NoticeSendError if a variable is unset."""

    def value(match: re.Match[str]) -> str:
        found = environment.get(match[1], "").strip()
        if not found:
            raise NoticeSendError(f"the environment variable {match[1]} is not set on {os.uname().nodename}")
        return quote(found, safe="") if match.start() < user_end else found

    start = url.find("://") + 3
    authority = url[start:].split("/", 1)[0]
    user_end = start + authority.rfind("@") if "@" in authority else 0
    return _VARIABLE.sub(value, url)


def remove_secrets(text: str, target: NoticeTarget, environment: Mapping[str, str]) -> str:
    """Mask the values of the target's variables, and known forms of tokens, in an error text."""
    for name in _VARIABLE.findall(target.url or ""):
        value = environment.get(name, "").strip()
        pieces = {value, quote(value, safe=""), quote(value), *(re.split(r"[/:@?&=]+", value) if "/" in value else ())}
        for piece in sorted(pieces, key=len, reverse=True):
            if len(piece) >= 4 and piece not in ("http", "https"):
                text = text.replace(piece, f"${{{name}}}")
    text, _ = mask_tokens(" ".join(text.split()))
    return text[:300]


def _send_to_command(
    command: Sequence[str], subject: str, body: str, event: str, environment: Mapping[str, str]
) -> None:
    """Give the user's program subject, an empty line and body on standard input, and nothing in its arguments."""
    with subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**environment, "RELAYRUN_EVENT": event},
        start_new_session=True,
    ) as process:
        _commands.add(process.pid)
        try:
            said, _ = process.communicate(f"{subject}\n\n{body}\n".encode(), timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            raise NoticeSendError(f"{command[0]} did not end within {ANSWER_SECONDS:.0f} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
            _commands.discard(process.pid)
    if process.returncode:
        last = said.decode("utf-8", errors="replace").strip().splitlines()[-1:]
        raise NoticeSendError(": ".join([f"{command[0]} ended with exit code {process.returncode}", *last]))


def _send_by_apprise(url: str, subject: str, body: str, event: str) -> None:
    if url.startswith(("json:", "jsons:")):
        url += f"{'&' if '?' in url else '?'}:event={event}"
    kinds = {"stopped": "failure", "failed": "failure", "done": "success", "evaluation": "success", "test": "info"}
    words = {"title": subject, "body": body, "body_format": "text", "notify_type": kinds.get(event, "warning")}
    result = _apprise_sender(url).notify(**words, log_level=logging.DEBUG)
    if not result:
        # why a connection failed is logged for debugging alone; the path of a URL in it may be a key
        said = [e.message for e in result.logs() if e.level != "DEBUG" or e.message.startswith("Socket Exception: ")]
        why = re.sub(r"Max retries exceeded with url: \S* ", "", " ".join(said))
        raise NoticeSendError(why or "apprise could not send it, and did not say why")


def _apprise_sender(url: str) -> Any:
    """Return apprise's sender for a URL. Raises NoticeSendError if apprise is not installed or does not take it."""
    scheme = url.partition(":")[0]
    try:
        import apprise
    except ImportError:
        raise NoticeSendError(f"{scheme} needs apprise, which this Python lacks; {INSTALL_HINT}") from None
    logger = logging.getLogger("apprise")
    logger.setLevel(logging.DEBUG)  # for the reasons in its results
    logger.propagate = False  # its records name URLs
    memory = apprise.PersistentStoreMode.MEMORY  # on disk it would store session tokens
    # a redirect would take the message to a host that the user did not name
    asset = apprise.AppriseAsset(app_id="relayrun", async_mode=False, storage_mode=memory, http_redirects=False)
    service, why = None, "it is the address of no service"
    try:
        service = apprise.Apprise.instantiate(url, asset=asset, suppress_exceptions=False)
    except TypeError as error:  # apprise's errors derive from it
        why = str(error)
    if service is None:
        raise NoticeSendError(f"apprise does not take this {scheme} URL: {why}")
    return apprise.Apprise([service], asset=asset)


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
SendResult = tuple[NoticeMessage, str | None]
"""A message, and why it was not sent; None if it was."""
SendResults = queue.SimpleQueue[SendResult | None]
"""Results of messages; None asks the process to finish."""


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
    messages = [each for each in messages if not (job and notices.must_wait_for_retry(each, waiting, now=now))]
    for message in messages:
        delivery = book[message.notice.id][1]
        delivery.note(message.target.name, "waits", now=now, reason="it was being sent and was cut short", tried=True)
    for notice, delivery in waiting:
        for target in targets:
            if now - notice.time > notices.KEEP_SECONDS and delivery.state(target.name) == "waits":
                delivery.note(target.name, "old", now=now, reason=delivery.reason(target.name))
        notices.record_delivery(run, notice, delivery, targets)  # before sending, or a full disk would repeat it
    failed = []
    for message, error in _send_all(policy, messages, environment, results):
        name = message.target.name
        if error is not None:
            book[message.notice.id][1].note(name, "waits", now=time.time(), reason=error)
            failed.append(f"{name}: {error}")
        for each in message.settles:
            if error is None:
                book[each][1].note(name, "sent" if each == message.notice.id else "counted", now=time.time())
            notices.record_delivery(run, *book[each], targets)
    notices.remove_old_notices(run)
    return failed


def _send_all(
    policy: NoticePolicy, messages: list[NoticeMessage], environment: Mapping[str, str], results: SendResults
) -> Iterator[SendResult]:
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
        del left[id(result[0])]
        yield result
    yield from [(message, why) for message in left.values()]


def _send_to_one(
    policy: NoticePolicy, messages: list[NoticeMessage], environment: Mapping[str, str], results: SendResults
) -> None:
    error: str | None = None
    for message in messages:
        if error is None:
            error = send_message(policy, message, environment)
        results.put((message, error))


def send_message(policy: NoticePolicy, message: NoticeMessage, environment: Mapping[str, str]) -> str | None:
    """Send one message; return the reason of a failure, None if it was sent."""
    subject, body, event = message_subject(policy, message), message_body(policy, message), message.notice.event
    try:
        send_to_target(message.target, subject, body, event=event, environment=environment)
    except NoticeSendError as error:
        return str(error)
    return None


def message_subject(policy: NoticePolicy, message: NoticeMessage) -> str:
    """Return the subject: run, cluster and event. What a long one loses is its end, the paths."""
    notice = message.notice
    what = f"{policy.run} on {policy.cluster}: {EVENT_TITLES.get(notice.event, notice.event)}"
    return textwrap.shorten(plain_text(f"[relayrun] {what}: {notice.reason}"), SUBJECT_LENGTH, placeholder=" ...")


def message_body(policy: NoticePolicy, message: NoticeMessage) -> str:
    """Return the body: the event, the state of the run, and the command to continue."""
    notice, since = message.notice, format_time(message.since, zone=True)
    place = (notice.attempt, f"job {notice.job_id}" if notice.job_id else "", notice.nodes)
    facts = [
        ("what", notice.reason),
        ("run", f"{policy.run} on {policy.cluster}"),
        ("when", format_time(notice.time, zone=True)),
        ("more", f"{message.count - 1} more since {since}" if message.count > 1 else ""),
        ("attempt", ", ".join(str(part) for part in place if part not in (None, ""))),
        ("iteration", f"{notice.iteration} of {notice.total_steps}" if notice.iteration is not None else ""),
        ("saved", f"iteration {notice.durable_iteration}" if notice.durable_iteration is not None else ""),
        ("go on", notice.go_on or ""),
        ("log", notice.log or ""),
    ]
    lines = [f"{name + ':':<11}{one_line(plain_text(text), 700)}" for name, text in facts if text]
    text = "\n".join(lines)
    if notice.words:
        text += "\n\n" + plain_text(notice.words[:MAX_WORDS])
    return text if len(text) <= BODY_LENGTH else text[: BODY_LENGTH - 4].rstrip() + "\n..."


def plain_text(text: str) -> str:
    """Return a text of a rank or log without control characters, mentions, links and markup.

    Line breaks stay; known forms of tokens are masked.
    """
    text, _ = mask_tokens(text)
    lines = re.split(r"\r\n|[\n\r\v\f\x85\u2028\u2029]", text)
    seen = ["".join(" " if unicodedata.category(c) in _INVISIBLE else c for c in line).rstrip() for line in lines]
    text = "\n".join(seen).translate(_ACTIVE)
    return re.sub(r"\]\s*\(", "] - (", text).replace("://", ": //").replace("__", "_ _")


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
    for pid in list(_commands):  # those that still run
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(code)  # a thread may still wait for a silent target
