"""Receivers of messages on loopback: a mail server, a web server and a hub of models that keep what they are told."""

from __future__ import annotations

import base64
import email
import email.policy
import hashlib
import json
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


@dataclass
class HubServer:
    """What a stand-in for the Hugging Face hub holds. It knows one token, and takes large files by LFS."""

    token: str
    url: str = ""
    repositories: dict[str, bool] = field(default_factory=dict)
    """Whether each is private, by name."""
    branches: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict, repr=False)
    """Large files by their SHA-256."""
    commits: list[tuple[str, str, dict[str, bytes]]] = field(default_factory=list)
    """Repository, branch, and the contents of each commit by name."""
    sent: list[str] = field(default_factory=list)
    """SHA-256 of the large files that were sent, in order, also of those that were not taken."""
    refuse: set[str] = field(default_factory=set)
    """SHA-256 of the large files that it does not take."""

    def empty(self) -> None:
        """Forget all that was sent."""
        for held in (self.repositories, self.branches, self.objects, self.commits, self.sent):
            held.clear()

    def head(self, name: str, branch: str) -> dict[str, bytes]:
        """The files of a branch: each commit changes some."""
        found: dict[str, bytes] = {}
        for repository, where, files in self.commits:
            found |= files if (repository, where) == (name, branch) else {}
        return found

    def tree(self) -> dict[str, str]:
        """What it holds, as `Place.tree` has files: hashes by paths below `hub`."""
        found = {f"hub/objects/{oid}": oid for oid in self.objects} | {f"hub/{name}": "" for name in self.repositories}
        for name, branch, files in self.commits:
            place = f"hub/{name}/{branch}"
            found[place] = found.get(place, "") + "a commit;"
            found |= {f"{place}/{each}": hashlib.sha256(data).hexdigest() for each, data in files.items()}
        return found


@contextmanager
def hub_server(token: str) -> Iterator[HubServer]:
    """A server of as much of the hub as an upload asks for."""
    hub = HubServer(token)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.whole(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(iter(self.chunk, b""))
            path = self.path.partition("?")[0]
            if path.startswith("/objects/"):
                return self.take(path.rpartition("/")[2], body)
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.say(401, {"error": "Invalid user token."})
            parts = path.strip("/").split("/")
            said = json.loads(body) if body and not path.startswith("/api/models/") else {}
            if path == "/api/whoami-v2":
                return self.say(200, {"name": "me", "type": "user"})
            if path == "/api/validate-yaml":
                return self.say(200, {"errors": [], "warnings": []})
            if path == "/api/repos/create":
                name = f"{said['organization']}/{said['name']}"
                if name in hub.repositories:
                    return self.say(409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"})
                hub.repositories[name] = said.get("visibility") == "private" or bool(said.get("private"))
                return self.say(200, {"url": f"{hub.url}/{name}"})
            if path.endswith(".git/info/lfs/objects/batch"):
                return self.say(200, {"objects": [self.action(each["oid"], each["size"]) for each in said["objects"]]})
            if parts[:2] == ["api", "models"] and len(parts) == 6:
                return self.model(f"{parts[2]}/{parts[3]}", parts[4], parts[5], body)
            return self.say(404, {"error": f"no {path}"})

        do_GET = do_POST = do_PUT = answer

        def chunk(self) -> bytes:
            if not (line := self.rfile.readline()):
                raise ConnectionResetError
            data = self.whole(int(line, 16))
            self.whole(2)
            return data

        def whole(self, size: int) -> bytes:
            """The next bytes of a request; a client that was killed sends fewer, and the request does not count."""
            data = self.rfile.read(size)
            if len(data) != size:
                raise ConnectionResetError
            return data

        def action(self, oid: str, size: int) -> dict[str, object]:
            found: dict[str, object] = {"oid": oid, "size": size}
            if oid not in hub.objects:
                found["actions"] = {"upload": {"href": f"{hub.url}/objects/{oid}"}}
            return found

        def take(self, oid: str, body: bytes) -> None:
            hub.sent.append(oid)
            if oid in hub.refuse or hashlib.sha256(body).hexdigest() != oid:
                return self.say(403, {"error": "no room is left"})
            hub.objects[oid] = body
            return self.say(200, {})

        def mode(self, path: str, held: bytes | None) -> dict[str, object]:
            """How a file is sent, and the hash of the one that the branch has."""
            large, oid = path.endswith(".safetensors"), None
            if held is not None:
                blob = b"blob %d\0" % len(held) + held
                oid = hashlib.sha256(held).hexdigest() if large else hashlib.sha1(blob).hexdigest()
            return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

        def model(self, name: str, what: str, branch: str, body: bytes) -> None:
            if what == "branch":
                hub.branches.add(branch)
                return self.say(201, {})
            if what == "preupload":
                asked = [each["path"] for each in json.loads(body)["files"]]
                return self.say(200, {"files": [self.mode(path, hub.head(name, branch).get(path)) for path in asked]})
            if what == "commit":
                found = {}
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "lfsFile":
                        found[value["path"]] = hub.objects[value["oid"]]
                    elif line["key"] == "file":
                        found[value["path"]] = base64.b64decode(value["content"])
                hub.commits.append((name, branch, found))
                oid = f"{len(hub.commits):040x}"
                return self.say(200, {"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid})
            if what == "revision":
                return self.say(200, {"id": name, "sha": f"{len(hub.commits):040x}", "siblings": []})
            return self.say(404, {"error": f"no {what}"})

        def say(self, code: int, answer: dict[str, object]) -> None:
            text = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(BrokenPipeError, ConnectionResetError):  # who asked has gone
                super().handle()

    with _served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        hub.url = f"http://127.0.0.1:{port}"
        yield hub


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
