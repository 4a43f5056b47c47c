"""Channels of notices: mail, webhook, a command of the user, and the services of apprise.

Mail, webhook and command use the standard library alone. Secrets come from the environment when a message is sent, and
are removed from every error text.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import http.client
import json
import logging
import os
import re
import signal
import smtplib
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from email.message import EmailMessage
from email.policy import SMTP
from typing import Any
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit

from relayrun.control.notify.notices import NoticeTarget
from relayrun.masking import mask_tokens

ANSWER_SECONDS = 15.0
"""Seconds that a receiver has to answer."""
INSTALL_HINT = "install relayrun's extra `notify` where cluster.python is"

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_OWN_APIS = ("hooks.slack.com", "discord.com", "discordapp.com", "webhook.office.com")
"""Hosts whose webhooks want a format of their own; apprise knows it."""
_commands: set[int] = set()
"""Process groups of running commands."""


class NoticeSendError(Exception):
    """A message was not sent; the text gives the reason and contains no secret."""


def send_to_target(
    target: NoticeTarget,
    subject: str,
    body: str,
    *,
    event: str,
    environment: Mapping[str, str],
    limit: float = ANSWER_SECONDS,
) -> None:
    """Send one message. Raises NoticeSendError."""
    try:
        if target.command:
            _send_to_command(target.command, subject, body, event, environment, limit)
            return
        url = expand_variables(target.url or "", environment)
        parts = urlsplit(url)
        if parts.scheme in ("mailto", "mailtos"):
            _send_mail(parts, subject, body, limit)
        elif parts.scheme in ("json", "jsons", "http", "https") and not _has_own_api(parts):
            _send_to_webhook(parts, subject, body, event, limit)
        else:
            _send_by_apprise(url, subject, body, event)
    except NoticeSendError as error:
        raise NoticeSendError(remove_secrets(str(error), target, environment)) from None
    except Exception as error:  # any error of a library
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
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
    command: Sequence[str], subject: str, body: str, event: str, environment: Mapping[str, str], limit: float
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
            said, _ = process.communicate(f"{subject}\n\n{body}\n".encode(), timeout=limit)
        except subprocess.TimeoutExpired:
            raise NoticeSendError(f"{command[0]} did not end within {limit:.0f} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
            _commands.discard(process.pid)
    if process.returncode:
        last = said.decode("utf-8", errors="replace").strip().splitlines()[-1:]
        raise NoticeSendError(": ".join([f"{command[0]} ended with exit code {process.returncode}", *last]))


def end_commands() -> None:
    """Kill the commands that still run, before the sending process exits."""
    for pid in list(_commands):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _send_mail(parts: SplitResult, subject: str, body: str, limit: float) -> None:
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    user = unquote(parts.username or "")
    receivers = [each.strip() for each in query.get("to", "").split(",") if each.strip()]
    if not receivers:
        raise NoticeSendError("the mail URL names nobody: mailto://SERVER?to=NAME@DOMAIN")
    host = query.get("smtp") or parts.hostname or "localhost"
    mode = query.get("mode") or ("starttls" if parts.scheme == "mailtos" else "insecure")
    port = parts.port or {"ssl": 465, "starttls": 587}.get(mode, 25)
    message = EmailMessage(policy=SMTP.clone(max_line_length=998))
    message["Subject"] = subject
    message["From"] = query.get("from") or (user if "@" in user else f"relayrun@{os.uname().nodename}")
    message["To"] = ", ".join(receivers)
    message["Date"] = email.utils.formatdate()
    message["Message-ID"] = email.utils.make_msgid(domain="relayrun")
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(body)
    context = ssl.create_default_context()
    connect = (
        smtplib.SMTP_SSL(host, port, timeout=limit, context=context)
        if mode == "ssl"
        else smtplib.SMTP(host, port, timeout=limit)
    )
    with connect as server:
        if mode == "starttls":
            server.starttls(context=context)
        if parts.password is not None:
            server.login(user, unquote(parts.password))
        refused = server.send_message(message)
    if refused:
        raise NoticeSendError(f"the server took it for some, and refused {', '.join(refused)}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects of a webhook: the message would reach a host that the user did not name."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _send_to_webhook(parts: SplitResult, subject: str, body: str, event: str, limit: float) -> None:
    secure = parts.scheme in ("jsons", "https")
    host = parts.netloc.rpartition("@")[2]
    query = f"?{parts.query}" if parts.query else ""
    request = urllib.request.Request(
        f"{'https' if secure else 'http'}://{host}{parts.path or '/'}{query}",
        data=json.dumps({"title": subject, "message": body, "event": event}).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "relayrun"},
    )
    if parts.password is not None:
        user = f"{unquote(parts.username or '')}:{unquote(parts.password)}".encode()
        request.add_header("Authorization", "Basic " + base64.b64encode(user).decode())
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(request, timeout=limit):
            return
    except urllib.error.HTTPError as error:
        with error:
            raise NoticeSendError(f"the webhook answered {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise NoticeSendError(f"the webhook cannot be reached: {error.reason}") from None
    except TimeoutError:
        raise NoticeSendError(f"the webhook did not answer within {limit:.0f} s") from None
    except http.client.HTTPException as error:
        raise NoticeSendError(f"the webhook broke off: {type(error).__name__}") from None


def _has_own_api(parts: SplitResult) -> bool:
    host = parts.hostname or ""
    return parts.scheme == "https" and any(host == each or host.endswith(f".{each}") for each in _OWN_APIS)


def _send_by_apprise(url: str, subject: str, body: str, event: str) -> None:
    try:
        import apprise
    except ImportError:
        raise NoticeSendError(
            f"{url.partition(':')[0]} needs apprise, which this Python lacks; {INSTALL_HINT}"
        ) from None
    heard = _LastWarning()
    logger = logging.getLogger("apprise")
    logger.addHandler(heard)
    try:
        memory = apprise.PersistentStoreMode.MEMORY  # on disk it would store session tokens
        asset = apprise.AppriseAsset(app_id="relayrun", async_mode=False, storage_mode=memory)
        sender = apprise.Apprise(asset=asset)
        if not sender.add(url):
            scheme, why = url.partition(":")[0], heard.last or "a part is missing"
            raise NoticeSendError(f"apprise does not take this {scheme} URL: {why}")
        kinds = {"stopped": "failure", "failed": "failure", "done": "success", "evaluation": "success", "test": "info"}
        kind, text = apprise.NotifyType(kinds.get(event, "warning")), apprise.NotifyFormat.TEXT
        if not sender.notify(title=subject, body=body, body_format=text, notify_type=kind):
            raise NoticeSendError(heard.last or "apprise could not send it, and did not say why")
    finally:
        logger.removeHandler(heard)


class _LastWarning(logging.Handler):
    """Keeps apprise's last warning of this thread: its methods return only True or False."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.last = record.getMessage()
