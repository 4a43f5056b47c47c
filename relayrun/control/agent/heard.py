"""What agents have said of their nodes, and which of them say nothing any more. Nodes are numbers, from 0 on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from relayrun.control.agent.lines import Message

AGENT_BEAT_SECONDS = 1.0
"""Between two words of an agent that has nothing to say, and between two looks at who has said none."""
SILENT_BEATS = 20
"""An agent of which so many looks in a row found no word is given up. Looks are counted and no seconds: the coordinator
itself may have waited for a file system."""


class AgentContacts:
    """The names and free ports of nodes, and when their agents were last heard.

    Args:
        names: of the nodes, as far as they are known before their agents say hello.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = dict(names)
        self.ports: dict[int, int] = {}
        """A port that was free on each node when its agent last said so; of those that have said hello."""
        self.probe_ports: dict[int, int] = {}
        """Another one."""
        self._silent: dict[int, int] = {}
        """How many looks in a row found no word of each node."""
        self._words: dict[int, float] = {}
        """When each last said something."""
        self._looked = self.greeted = time.monotonic()
        """When that was last counted; when the last agent said hello."""

    def hello(self, node: int, message: Message) -> None:
        """Take the first message of an agent."""
        self._names[node], self.ports[node] = str(message.get("name", node)), int(message["port"])
        self.probe_ports[node] = int(message.get("probe_port", 0))
        self.greeted = time.monotonic()

    def word(self, node: int) -> None:
        """Its agent has said something."""
        self._silent[node], self._words[node] = 0, time.monotonic()

    def last_word(self, node: int) -> float:
        """When its agent was last heard, by `time.monotonic`; 0 where it never was."""
        return self._words.get(node, 0.0)

    def name(self, node: int) -> str:
        """The name of a node; its number where that is not known."""
        return self._names.get(node, f"node {node}")

    def silent(self, nodes: Iterable[int]) -> list[int]:
        """Those whose agents have said nothing for too long; to be asked for at each beat."""
        if time.monotonic() - self._looked < AGENT_BEAT_SECONDS:
            return []
        self._looked = time.monotonic()
        for node in nodes:
            self._silent[node] = self._silent.get(node, 0) + 1
        return [node for node in nodes if self._silent[node] > SILENT_BEATS]
