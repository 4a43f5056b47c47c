"""Messages between the processes of one job: JSON objects, one on a line, over a socket; and the form of each kind.

A message never runs code. A line that is no JSON object, or a message with wrong fields, ends its connection and
never the coordinator. Between nodes each line begins with its HMAC, under a key of this connection and direction
(`agent.authentication`); the number of the line is part of it, so no line can be changed, left out, or sent again.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import socket
from collections.abc import Mapping
from typing import Any

from relayrun.control.agent.hang_detection import RankActivity
from relayrun.control.agent.memory_copies import NodeMemoryCopy

Message = dict[str, Any]

RECEIVE_BYTES = 1 << 16
SILENCE_SECONDS = 20
"""Seconds without an answer of the other machine after which it is lost; the kernel asks, since a process may be busy.
"""
LONGEST_MESSAGE = 1 << 20
"""Maximum bytes of a line; a longer one does not come from relayrun."""


GONE = "it closed the connection"


class MessageSocket:
    """A socket that sends and receives messages. `longest`: maximum bytes of a received line."""

    def __init__(self, connection: socket.socket, *, longest: int = LONGEST_MESSAGE) -> None:
        self.connection, self._longest = connection, longest
        self._rest = b""
        self._keys: tuple[bytes, bytes] | None = None
        self._sent = self._received = 0
        """Lines with an HMAC so far, in each direction."""
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_SECONDS // 4)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_SECONDS // 4)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_SECONDS)

    def authenticate(self, send_key: bytes, receive_key: bytes) -> None:
        """Send and accept only lines with an HMAC from here on."""
        self._keys, self._longest = (send_key, receive_key), LONGEST_MESSAGE

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, kind: str, **values: object) -> None:
        """Send a message. A lost peer is noticed by `receive`."""
        line = json.dumps({"kind": kind, **values}).encode()
        if self._keys is not None:
            line = _line_hmac(self._keys[0], self._sent, line) + line
            self._sent += 1
        with contextlib.suppress(OSError):
            self.connection.sendall(line + b"\n")

    def receive(self) -> list[Message]:
        """Return the complete messages that have come. Raises EOFError if the peer is gone or sends anything else."""
        try:
            data = self.connection.recv(RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            raise EOFError(GONE)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (*lines, self._rest))) > self._longest:
            raise EOFError(f"a line of more than {self._longest} bytes")
        try:
            found = [json.loads(self._authentic(line)) for line in lines]
        except (ValueError, RecursionError):  # a thousand brackets, one in the other
            raise EOFError("a line that is no message") from None
        if not all(isinstance(message, dict) and isinstance(message.get("kind"), str) for message in found):
            raise EOFError("a line that is no message")
        return found

    def _authentic(self, line: bytes) -> bytes:
        if self._keys is None:
            return line
        given, content = line[:HMAC_CHARACTERS], line[HMAC_CHARACTERS:]
        if not hmac.compare_digest(given, _line_hmac(self._keys[1], self._received, content)):
            raise EOFError("a line without the HMAC of this connection")
        self._received += 1
        return content

    def close(self) -> None:
        self.connection.close()


HMAC_CHARACTERS = 64


def _line_hmac(key: bytes, number: int, line: bytes) -> bytes:
    return hmac.digest(key, b"%d " % number + line, "sha256").hex().encode()


INTEGER, PORT = range(-(1 << 53), 1 << 53), range(1 << 16)
SIZE = (range(1 << 62), None)
_GPU_COUNTS = {"index": INTEGER, "ecc_uncorrected?": INTEGER, "slowed?": INTEGER}
GPU = {**_GPU_COUNTS, "error?": str, "rows_pending?": bool, "rows_failed?": bool}
FACTS = dict.fromkeys(("shm?", "tmp?", "open_files?"), SIZE) | {
    "unwritable?": {"run_dir?": str, "tmp?": str},
    "gpus?": [GPU],
    "command?": {"code": (INTEGER, None), "words": str},
    "seconds?": float,
    **dict.fromkeys(("answer?", "gpu_error?"), str),
}
"""Fields of a node's facts, see `agent.node_facts`, and their types."""
COPY, ACTIVITY = (INTEGER, INTEGER, str, bool), (INTEGER, INTEGER, str, INTEGER, float, (float, math.inf), str)
"""Values of `NodeMemoryCopy` and of `RankActivity`."""
MESSAGE_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "hello": {"name": str, "port": PORT},
    "dead": {"restart": INTEGER, "rank": INTEGER, "code": INTEGER, "error": str, "told": bool},
    "ended": {"restart": INTEGER, "port": PORT, "memory": [[*COPY]], "facts": FACTS},
    "beat": {"restart": INTEGER, "standing?": ([[*ACTIVITY]], None)},
    "asked": {"why": str},
    "started": {"restart": INTEGER, "process": float, "initialised": float, "loaded": float},
    "stepped": {"restart": INTEGER, "time": float},
    "health": {"facts": FACTS},
    "clock": {"sent": float, "here": float},
}
"""Fields of each kind down to the leaves, as `fits` reads them. Further fields of a message, and other kinds, are
ignored."""

assert len(COPY) == len(NodeMemoryCopy._fields)
assert len(ACTIVITY) == len(RankActivity._fields)


def message_error(message: Message) -> str:
    """Return the defect of a message in a few words; empty if it is valid or of an unknown kind."""
    kind = message["kind"]
    for field, form in MESSAGE_FIELDS.get(kind, {}).items():
        name = field.rstrip("?")
        if name not in message and name == field:
            return f"{kind} without {name}"
        if name in message and not fits(message[name], form):
            return f"{kind} with {name} {message[name]!r:.40}"
    return ""


def fits(value: object, form: Any) -> bool:
    """Return whether a value has a form: a type, a range, a constant, a tuple of alternatives, a list of one form (any
    number of such) or of several (a row), or a dictionary of forms (`name?` may be missing, and no other is there)."""
    if isinstance(form, tuple):
        return any(fits(value, each) for each in form)
    if isinstance(form, range):
        return type(value) is int and value in form
    if form is float:  # also finite, and convertible
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18
    if isinstance(form, list):
        if not isinstance(value, list) or (len(form) > 1 and len(value) != len(form)):
            return False
        return all(map(fits, value, form if len(form) > 1 else form * len(value)))
    if isinstance(form, dict):
        names = {name.rstrip("?"): each for name, each in form.items()}
        required = form.keys() & names.keys()
        return (
            isinstance(value, dict)
            and required <= value.keys() <= names.keys()
            and all(fits(each, names[name]) for name, each in value.items())
        )
    return type(value) is form or (not isinstance(form, type) and value is not True and value == form)
