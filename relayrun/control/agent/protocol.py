"""What an agent may say to the coordinator: the values of each kind of message, and of what type they are.

Ports of jobs may meet, and a message may come from anybody: what is not of this form ends the connection that it came
from, and never the coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relayrun.control.agent.lines import Message
from relayrun.control.agent.memory_copies import NodeMemoryCopy
from relayrun.control.agent.sections import RankActivity

NUMBER = (int, float)
MESSAGE_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "hello": {"node": int, "name": str, "port": int},
    "dead": {"round": int, "rank": int, "code": int, "error": str, "told": bool},
    "ended": {"round": int, "port": int, "memory": list, "facts": dict},
    "beat": {"round": int},
    "asked": {},
    "started": {"round": int, "process": NUMBER, "initialised": NUMBER, "loaded": NUMBER},
    "stepped": {"round": int, "time": NUMBER},
    "health": {"facts": dict},
    "clock": {"sent": NUMBER, "here": NUMBER},
    "probing": {},
    "probed": {},
}
"""By kind; every value must be there. What is of no such kind is not heard by the coordinator."""
MESSAGE_ROWS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "ended": {"memory": (int, int, str, bool)},
    "beat": {"standing": (int, int, str, int, NUMBER, NUMBER, str)},
}
"""Lists of values in the order of `Held` and of `Standing`, or null."""
PORTS = range(1 << 16)

assert len(MESSAGE_ROWS["ended"]["memory"]) == len(NodeMemoryCopy._fields)
assert len(MESSAGE_ROWS["beat"]["standing"]) == len(RankActivity._fields)


def message_error(message: Message) -> str:
    """What is wrong with a message, in a few words; empty where nothing is, or where it is of an unknown kind."""
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
