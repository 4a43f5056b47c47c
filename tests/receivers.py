"""Receivers of messages on loopback: a mail server, a web server and a hub of models that keep what they are told."""

from __future__ import annotations

import email
import email.policy
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.waiting import wait_for


@dataclass
class Mailbox:
    """What a mail server was given."""

    port: int = 0
    letters: list[EmailMessage] = field(default_factory=list)
    receivers: list[list[str]] = field(default_factory=list)


@contextmanager
def mail_server() -> Iterator[Mailbox]:
    """A server of as much SMTP as smtplib speaks."""
    box = Mailbox()

    class Handler(socketserver.StreamRequestHandler):
        def say(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

        def handle(self) -> None:
            self.say("220 loopback")
            to: list[str] = []
            for line in self.rfile:
                verb = line.decode().strip().upper()
                if verb == "DATA":
                    self.say("354 go on")
                    content = b"".join(iter(self.rfile.readline, b".\r\n")).replace(b"\r\n..", b"\r\n.")
                    letter = email.message_from_bytes(content, policy=email.policy.default)
                    assert isinstance(letter, EmailMessage)
                    box.letters.append(letter)
                    box.receivers.append(to)
                    to = []
                elif verb.startswith("RCPT TO:"):
                    to.append(line.decode().strip()[9:-1])
                self.say("221 bye" if verb == "QUIT" else "250 ok")
                if verb == "QUIT":
                    return

    with _served(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)) as port:
        box.port = port
        yield box


@dataclass
class Web:
    """What a web server was asked."""

    port: int = 0
    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    """Method, path with query, body."""
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Status and body by what the path begins with; else 200 and an empty object."""
    silent: threading.Event = field(default_factory=threading.Event)
    """While it is set the server takes requests and does not answer."""


@contextmanager
def web_server() -> Iterator[Web]:
    """A server that answers every request as it was told to."""
    web = Web()
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            web.requests.append((self.command, self.path, body))
            wait_for(lambda: not web.silent.is_set() or closing.is_set(), 900, step=0.05)
            code, text = next((a for start, a in web.answers.items() if self.path.startswith(start)), (200, b"{}"))
            self.send_response(code)
            if code == 302:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = answer

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(BrokenPipeError, ConnectionResetError):  # who asked has gone
                super().handle()

    with _served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        web.port = port
        try:
            yield web
        finally:
            closing.set()


@contextmanager
def _served(server: socketserver.ThreadingTCPServer) -> Iterator[int]:
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(300)


@pytest.fixture
def mail() -> Iterator[Mailbox]:
    with mail_server() as box:
        yield box


@pytest.fixture
def web() -> Iterator[Web]:
    with web_server() as server:
        yield server
