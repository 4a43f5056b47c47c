"""A hook that kills its own rank: at set-up, in a forward pass, before an update, or in a save, in one restart.

    {hook: "tests.training.killing:Kills", options: {kills: ["1:1:setup", "2:0:forward:12", "3:0:save:10"]}}

Each entry is ROUND:RANK:WHERE[:ITERATION]. Some are `update`, after something was done to copies in memory: `spoil`, a
byte of all its own was changed; `spoil-all`, and of those that the next node keeps of it; `lose`, its node's folder was
emptied, as that of a node which takes the place of a lost one. `send` is while the copy of that iteration is on its way
to the next node. Where there are no restarts nothing is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from relayrun.control.agent.memory_copies import HEADER_BYTES, read_copies
from relayrun.train.checkpoint.memory_replication import NeighbourReplica
from relayrun.train.hooks import Gradients, Hook, HookContext, StepStart
from tests.waiting import wait_for


class Kills(Hook):
    def __init__(self, kills: list[str]) -> None:
        number = os.environ.get("RELAYRUN_RESTART", "0")
        self._kills = [kill.split(":", 1)[1] for kill in kills if kill.split(":")[0] == number]
        self._iteration = 0

    def setup(self, context: HookContext) -> None:
        self._rank = context.ranks.rank
        self._folders = context.run_dir
        self._folder = Path(os.environ.get("RELAYRUN_MEMORY", ""))
        (context.run_dir / f"memory-folder-{self._rank}").write_text(str(self._folder))
        self._here("setup")
        self._sent = 0
        if any(kill.startswith(f"{self._rank}:send:") for kill in self._kills):
            self._watch_neighbour()
        context.model.chunks[0].register_forward_pre_hook(self._forward)

    def _here(self, where: str) -> None:
        if f"{self._rank}:{where}" in self._kills:
            os.kill(os.getpid(), signal.SIGKILL)

    def before_step(self, start: StepStart) -> None:
        self._iteration = start.iteration

    def _forward(self, _module: object, _inputs: Any) -> None:
        """In the middle of an iteration, while the others wait for this rank's gradients."""
        self._here(f"forward:{self._iteration}")

    def before_update(self, gradients: Gradients) -> None:
        """All ranks have computed their gradients."""
        at = gradients.iteration
        if f"{self._rank}:spoil:{at}" in self._kills:
            spoil(self._folder, f"rank-{self._rank:04}.*")
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{self._rank}:spoil-all:{at}" in self._kills:
            self._wait_for_neighbour()
            for folder in self._memory_folders():
                spoil(folder, f"*-{self._rank:04}.*")
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{self._rank}:lose:{at}" in self._kills:
            self._wait_for_neighbour()
            for path in self._folder.iterdir():
                path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self._here(f"update:{gradients.iteration}")

    def _memory_folders(self) -> set[Path]:
        return {Path(path.read_text()) for path in self._folders.glob("memory-folder-*")}

    def _wait_for_neighbour(self) -> None:
        """Wait until the next node keeps the newest copies of this one: a step may be shorter than their way."""
        newest: dict[int, int] = {}
        for copy in read_copies(self._folder):
            if not copy.kept:
                newest[copy.rank] = max(copy.iteration, newest.get(copy.rank, 0))

        def kept() -> bool:
            found = [copy for folder in self._memory_folders() for copy in read_copies(folder) if copy.kept]
            return {(copy.rank, copy.iteration) for copy in found} >= set(newest.items())

        with contextlib.suppress(AssertionError):  # the other node was lost meanwhile
            wait_for(kept, seconds=30, step=0.01)

    def _watch_neighbour(self) -> None:
        """Kill this rank when it has sent the header of its copy, and not the copy."""
        sends = NeighbourReplica._pass

        def send(neighbour: NeighbourReplica, *arguments: Any) -> Any:
            self._sent += 1
            if self._sent % 2 == 0:  # behind a header
                self._here(f"send:{self._iteration}")
            return sends(neighbour, *arguments)

        NeighbourReplica._pass = send  # type: ignore[method-assign]

    def before_publish(self, iteration: int, folder: Path) -> None:
        """All bytes of the checkpoint are written, and it does not count yet."""
        self._here(f"save:{iteration}")


def spoil(folder: Path, names: str) -> None:
    """Change a byte of each of these files."""
    for path in folder.glob(names):
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + 5000)
            byte = file.read(1)
            file.seek(HEADER_BYTES + 5000)
            file.write(bytes([byte[0] ^ 1]))
