"""Proof that a connection belongs to an attempt: a challenge in both directions under the attempt's secret.

    coordinator → agent    challenge {nonce}
    agent → coordinator    answer {node, nonce, proof}
    coordinator → agent    welcome {proof}

A proof is an HMAC-SHA256 over the role, the job, the attempt, the node and both nonces. An answer to another challenge,
or a message of the other role, proves nothing. Both then have a key for each direction, see `agent.messages`. The
coordinator listens only on the address that the agents are told. Standard library only.
"""

from __future__ import annotations

import fcntl
import hmac
import ipaddress
import json
import secrets
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

from relayrun.control.agent.messages import Message, MessageSocket, fits
from relayrun.control.rundir.attempt import Attempt

LONGEST_HANDSHAKE = 1024
"""Maximum bytes of a line of a peer that has proved nothing."""
HANDSHAKE_SECONDS = 10.0
"""Seconds for a peer to prove that it belongs to the job."""
_ANSWER = {"kind": str, "node": range(1 << 31), "nonce": str, "proof": str}
SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class AttemptKey:
    """The secret of an attempt, and its job and number."""

    secret: bytes
    job: str
    attempt: int

    @classmethod
    def of(cls, attempt: Attempt) -> AttemptKey:
        """Read the secret of an attempt that has begun. Raises RunDirError."""
        return cls(attempt.read_secret(), attempt.started_record().job_id, attempt.number)

    def digest(self, role: str, node: int, nonces: tuple[str, str]) -> bytes:
        """Return the HMAC for a role of this connection. `nonces`: the coordinator's and the agent's."""
        words = json.dumps([role, self.job, self.attempt, node, *nonces])
        return hmac.digest(self.secret, words.encode(), "sha256")

    def admit(self, lines: MessageSocket, nonce: str, answer: Message) -> int:
        """Return the node that a peer has proved to be, and prove to it that this is its coordinator. `nonce`: of the
        challenge. Raises EOFError."""
        if not fits(answer, _ANSWER):
            raise EOFError("it does not answer the challenge")
        node, nonces = int(answer["node"]), (nonce, answer["nonce"])
        if not _same(answer["proof"], self.digest("agent", node, nonces)):
            raise EOFError("it does not know the secret of this attempt")
        lines.send("welcome", proof=self.digest("coordinator", node, nonces).hex())
        lines.authenticate(self.digest("to agent", node, nonces), self.digest("to coordinator", node, nonces))
        return node

    def join(self, lines: MessageSocket, node: int) -> None:
        """Prove to the coordinator that this is the agent of `node`, and let it prove itself. Raises EOFError."""
        until = time.monotonic() + HANDSHAKE_SECONDS
        nonce = secrets.token_hex(16)
        challenge = _next(lines, {"kind": str, "nonce": str}, until)
        nonces = challenge["nonce"], nonce
        lines.send("answer", node=node, nonce=nonce, proof=self.digest("agent", node, nonces).hex())
        welcome = _next(lines, {"kind": str, "proof": str}, until)
        if not _same(welcome["proof"], self.digest("coordinator", node, nonces)):
            raise EOFError("the program there does not know the secret of this attempt")
        lines.authenticate(self.digest("to coordinator", node, nonces), self.digest("to agent", node, nonces))
        lines.connection.settimeout(None)


def _next(lines: MessageSocket, form: dict[str, type], until: float) -> Message:
    """Wait for one message of this form. Raises EOFError."""
    found: list[Message] = []
    while not found:
        lines.connection.settimeout(max(0.001, until - time.monotonic()))
        found = lines.receive()
    if len(found) != 1 or not fits(found[0], form):
        raise EOFError("the program there is no coordinator")
    return found[0]


def _same(given: str, digest: bytes) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), digest.hex().encode())


def listen(host: str, port: int) -> socket.socket:
    """Listen on the address of this machine that peers are told as `host`. On all addresses if the name is unknown or
    local here, as in many /etc/hosts: other nodes know it by another address."""
    with suppress(socket.gaierror):
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM) if host else ():
            if not _only_here(host, str(address[0])):
                with suppress(OSError):
                    return socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)
    return socket.create_server(("", port), backlog=socket.SOMAXCONN)


def _only_here(host: str, address: str) -> bool:
    """Return whether a name of a node means an address that other nodes cannot reach."""
    return host not in (address, "localhost") and ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_towards(host: str) -> str:
    """Return the network interface of this machine on the way to `host`; empty if that is not clear."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # nothing is sent
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex() if not _only_here(host, own) else ():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    return ""
