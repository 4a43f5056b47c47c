"""The nodes of a job as the coordinator knows them: node ranks, spare and lost nodes, names, and silent agents.

A node's rank is the number by which its ranks are counted; a spare node has none. Nodes are numbered from 0.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from relayrun.control.agent.messages import Message
from relayrun.control.decisions import Death

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


class NodeRanks:
    """The places of the nodes that train, and the nodes that were given up. Nodes are numbers, from 0 on.

    Args:
        wanted: how many nodes train. spare: how many more the job has. elastic: smaller numbers of nodes with which
            training may go on.
    """

    def __init__(self, wanted: int, *, spare: int = 0, elastic: Sequence[int] = ()) -> None:
        self.wanted, self.spare, self._elastic = wanted, spare, elastic
        self.nodes: list[int] = []
        """Which node has each place; at first none has."""
        self.lost: dict[int, Death] = {}
        """Nodes that were given up, each with the reason. None is taken in again."""
        self.absent: set[int] = set()
        """Nodes that have not come yet, and without which the others began."""
        self.late: set[int] = set()
        """Those of them that came later, as spare ones."""

    @property
    def left(self) -> int:
        """How many nodes of the job are there or expected: neither given up nor absent."""
        return self.wanted + self.spare - len(self.lost) - len(self.absent - self.lost.keys())

    def came(self, node: int) -> bool:
        """Its agent has said hello; whether that was late."""
        if node not in self.absent:
            return False
        self.absent.remove(node)
        self.late.add(node)
        return True

    @property
    def outlive_nodes(self) -> bool:
        """Whether another node may have the first place."""
        return self.spare > 0 or bool(self._elastic)

    def at(self, place: int) -> int | None:
        """The node that has this place; None where no node has it, as of a rank of an earlier layout."""
        return self.nodes[place] if 0 <= place < len(self.nodes) else None

    def missing(self, there: Collection[int]) -> set[int]:
        """Nodes that are neither `there` nor given up."""
        return set(range(self.wanted + self.spare)) - set(there) - self.lost.keys()

    def fitting(self, available: int) -> int:
        """With how many of so many nodes training may go on; 0: with none."""
        return max((nodes for nodes in (self.wanted, *self._elastic) if nodes <= available), default=0)

    def gone(self) -> list[int]:
        """Nodes that have a place and were given up."""
        return [node for node in self.nodes if node in self.lost]

    def taken(self, there: Collection[int]) -> dict[int, int]:
        """For each of these the node that may have its place, as far as there are some that are `there` without one."""
        spare = sorted(set(there) - set(self.nodes))
        return dict(zip(self.gone(), spare, strict=False))

    def following(self, taken: dict[int, int]) -> list[int]:
        """Return the nodes of another restart, by place: with those that have `taken` one, or fewer; or none."""
        left = [taken.get(node, node) for node in self.nodes if node in taken or node not in self.lost]
        return left if len(left) == len(self.nodes) else left[: self.fitting(len(left))]

    def why_none(self, names: str) -> str:
        """Why there can be no other restart, in words; `names`: of the nodes whose places nobody can have."""
        if sick := [death for node in self.gone() if (death := self.lost[node]).sick]:
            return f"{sick[0].node} is sick: {sick[0].error}"
        if self._elastic:
            return "too few nodes are left"
        if self.spare:
            return "no spare node is left"
        words = {death.error for node in self.gone() if (death := self.lost[node]).unended}
        return f"{names}: {words.pop()}" if words else f"the agent of {names} is gone"
