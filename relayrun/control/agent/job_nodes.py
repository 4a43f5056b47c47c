"""The nodes of a job as the coordinator knows them: node ranks, spare and lost nodes, names, and silent agents.

A node's rank is the number by which its ranks are counted; a spare node has none. Nodes are numbered from 0.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping

from relayrun.control.agent.messages import Message
from relayrun.control.decisions import Death

AGENT_BEAT_SECONDS = 1.0
"""Seconds between two messages of an idle agent, and between two looks for silent agents."""
SILENT_BEATS = 20
"""Consecutive looks without a message after which an agent is given up. Looks are counted, not seconds: the coordinator
itself may have waited for a file system."""


class AgentContacts:
    """Names and free ports of nodes, and the last message of each agent. `names`: known before the agents say hello."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = dict(names)
        self.ports: dict[int, int] = {}
        """A port that was free on each node when its agent last reported; of nodes that said hello."""
        self._silent: dict[int, int] = {}
        """Consecutive looks without a message of each node."""
        self._words: dict[int, float] = {}
        """Time of each agent's last message."""
        self._looked = self.greeted = time.monotonic()
        """Time of the last look (`greeted`: of the last hello)."""

    def hello(self, node: int, message: Message) -> None:
        """Take the first message of an agent."""
        self._names[node], self.ports[node] = str(message.get("name", node)), int(message["port"])
        self.greeted = time.monotonic()

    def word(self, node: int) -> None:
        """Note a message of this node's agent."""
        self._silent[node], self._words[node] = 0, time.monotonic()

    def last_word(self, node: int) -> float:
        """Return the time of its agent's last message by `time.monotonic`; 0 without one."""
        return self._words.get(node, 0.0)

    def name(self, node: int) -> str:
        """Return the name of a node; its number if the name is unknown."""
        return self._names.get(node, f"node {node}")

    def silent(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes of these whose agents are silent for too long; called at each beat."""
        if time.monotonic() - self._looked < AGENT_BEAT_SECONDS:
            return []
        self._looked = time.monotonic()
        for node in nodes:
            self._silent[node] = self._silent.get(node, 0) + 1
        return [node for node in nodes if self._silent[node] > SILENT_BEATS]


class NodeRanks:
    """The node ranks of a job, and the nodes that were given up. Nodes are numbers, from 0 on.

    Args:
        wanted: number of nodes that train; spare: number of further nodes.
    """

    def __init__(self, wanted: int, *, spare: int = 0) -> None:
        self.wanted, self.spare = wanted, spare
        self.nodes: list[int] = []
        """The node of each node rank; empty before the first start."""
        self.lost: dict[int, Death] = {}
        """Nodes that were given up, with the reason; they never come back."""
        self.absent: set[int] = set()
        """Nodes that had not come when the others began."""
        self.late: set[int] = set()
        """Absent nodes that came later, as spare nodes."""

    @property
    def left(self) -> int:
        """Number of nodes that are there or expected: neither given up nor absent."""
        return self.wanted + self.spare - len(self.lost) - len(self.absent - self.lost.keys())

    def came(self, node: int) -> bool:
        """Note a hello; return whether it came late."""
        if node not in self.absent:
            return False
        self.absent.remove(node)
        self.late.add(node)
        return True

    def at(self, place: int) -> int | None:
        """Return the node with this node rank; None without one, as for a rank of an earlier layout."""
        return self.nodes[place] if 0 <= place < len(self.nodes) else None

    def missing(self, there: Collection[int]) -> set[int]:
        """Return nodes that are neither `there` nor given up."""
        return set(range(self.wanted + self.spare)) - set(there) - self.lost.keys()

    def fitting(self, available: int) -> int:
        """Return the number of nodes, out of `available`, with which training can continue; 0: none."""
        return self.wanted if self.wanted <= available else 0

    def gone(self) -> list[int]:
        """Return nodes with a node rank that were given up."""
        return [node for node in self.nodes if node in self.lost]

    def taken(self, there: Collection[int]) -> dict[int, int]:
        """Return the spare node that replaces each lost node, as far as spare nodes are `there`."""
        spare = sorted(set(there) - set(self.nodes))
        return dict(zip(self.gone(), spare, strict=False))

    def following(self, taken: dict[int, int]) -> list[int]:
        """Return the nodes of the next restart by node rank, with replacements; empty if it is impossible."""
        left = [taken.get(node, node) for node in self.nodes if node in taken or node not in self.lost]
        return left if len(left) == len(self.nodes) else []

    def why_none(self, names: str) -> str:
        """Return in words why no restart is possible. `names`: of the lost nodes without a replacement."""
        if sick := [death for node in self.gone() if (death := self.lost[node]).sick]:
            return f"{sick[0].node} is sick: {sick[0].error}"
        if self.spare:
            return "no spare node is left"
        words = {death.error for node in self.gone() if (death := self.lost[node]).unended}
        return f"{names}: {words.pop()}" if words else f"the agent of {names} is gone"
