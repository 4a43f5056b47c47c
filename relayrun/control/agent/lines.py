"""Messages between processes of one job: JSON objects, a line each, over a socket.

No message runs anything by itself, and one that is no JSON object ends the connection.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

Message = dict[str, Any]

RECEIVE_BYTES = 1 << 16
SILENCE_SECONDS = 20
"""After so long without an answer the other machine is gone. The kernel asks it: its process may be busy."""
LONGEST_MESSAGE = 1 << 20
"""Bytes of a line: who sends more is none of ours."""


class MessageSocket:
    """A socket that gives and takes messages."""

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
        """For selectors."""
        return self.connection.fileno()

    def send(self, kind: str, **values: object) -> None:
        """Send a message. Whether the other side is gone is seen where it is read from."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps({"kind": kind, **values}).encode() + b"\n")

    def receive(self) -> list[Message]:
        """Return the whole messages that have come. Raises EOFError where the other side is gone, or talks nonsense."""
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
        """Close the socket."""
        self.connection.close()
