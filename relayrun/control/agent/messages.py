"""Messages between the processes of one job: JSON objects, one on a line, over a socket; and the form of each kind.

A message never runs code. A line that is no JSON object, or a message with wrong fields, ends its connection and
never the coordinator: ports of jobs may meet, and anybody may send a message.
"""

from __future__ import annotations

import contextlib
import json
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


class MessageSocket:
    """A socket that sends and receives messages."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_SECONDS // 4)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_SECONDS // 4)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_SECONDS)

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, kind: str, **values: object) -> None:
        """Send a message. A lost peer is noticed by `receive`."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps({"kind": kind, **values}).encode() + b"\n")

    def receive(self) -> list[Message]:
        """Return the complete messages that have come. Raises EOFError if the peer is gone or sends anything else."""
        try:
            data = self.connection.recv(RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data or len(self._rest) > LONGEST_MESSAGE:
            raise EOFError
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # a thousand brackets, one in the other
            raise EOFError from None
        if not all(isinstance(message, dict) and isinstance(message.get("kind"), str) for message in found):
            raise EOFError
        return found

    def close(self) -> None:
        self.connection.close()


NUMBER = (int, float)
MESSAGE_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "hello": {"node": int, "name": str, "port": int},
    "dead": {"restart": int, "rank": int, "code": int, "error": str, "told": bool},
    "ended": {"restart": int, "port": int, "memory": list, "facts": dict},
    "beat": {"restart": int},
    "asked": {},
    "started": {"restart": int, "process": NUMBER, "initialised": NUMBER, "loaded": NUMBER},
    "stepped": {"restart": int, "time": NUMBER},
    "health": {"facts": dict},
    "clock": {"sent": NUMBER, "here": NUMBER},
    "probing": {},
    "probed": {},
}
"""Required fields by kind. The coordinator ignores other kinds."""
MESSAGE_ROWS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "ended": {"memory": (int, int, str, bool)},
    "beat": {"standing": (int, int, str, int, NUMBER, NUMBER, str)},
}
"""Lists of values in the order of `NodeMemoryCopy` and of `RankActivity`, or null."""
PORTS = range(1 << 16)

assert len(MESSAGE_ROWS["ended"]["memory"]) == len(NodeMemoryCopy._fields)
assert len(MESSAGE_ROWS["beat"]["standing"]) == len(RankActivity._fields)


def message_error(message: Message) -> str:
    """Return the defect of a message in a few words; empty if it is valid or of an unknown kind."""
    kind = message["kind"]
    for name, wanted in MESSAGE_FIELDS.get(kind, {}).items():
        if not _has_type(message.get(name), wanted):
            return f"{kind} without {name}" if name not in message else f"{kind} with {name} {message[name]!r:.40}"
    for name, columns in MESSAGE_ROWS.get(kind, {}).items():
        rows = message.get(name) or []
        if not isinstance(rows, list) or not all(_is_row(row, columns) for row in rows):
            return f"{kind} with {name} {rows!r:.40}"
    for name in ("port", "probe_port"):
        if kind in ("hello", "ended") and message.get(name, 0) not in PORTS:
            return f"{kind} with {name} {message[name]!r:.40}"
    return ""


def _is_row(row: object, columns: tuple[Any, ...]) -> bool:
    return isinstance(row, list) and len(row) == len(columns) and all(map(_has_type, row, columns))


def _has_type(value: object, wanted: Any) -> bool:
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
