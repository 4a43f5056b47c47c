"""A hook that kills its own rank: at set-up, in a forward pass, before an update, or in a save, in one round.

    {hook: "tests.training.killing:Kills", options: {kills: ["1:1:setup", "2:0:forward:12", "3:0:save:10"]}}

Each entry is ROUND:RANK:WHERE[:ITERATION]. `spoil` is `update`, after a byte of all its copies in memory was changed.
Where there are no rounds nothing is killed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from relayrun.training.hooks import Context, Gradients, Hook, StepStart


class Kills(Hook):
    def __init__(self, kills: list[str]) -> None:
        number = os.environ.get("RELAYRUN_ROUND", "0")
        self._kills = [kill.split(":", 1)[1] for kill in kills if kill.split(":")[0] == number]
        self._iteration = 0

    def setup(self, context: Context) -> None:
        self._rank = context.ranks.rank
        (context.run_dir / "memory-folder").write_text(os.environ.get("RELAYRUN_MEMORY", ""))
        self._here("setup")
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
        if f"{self._rank}:spoil:{gradients.iteration}" in self._kills:
            for path in Path(os.environ["RELAYRUN_MEMORY"]).glob(f"rank-{self._rank:04}.*"):
                with path.open("r+b") as file:
                    file.seek(-200, os.SEEK_END)
                    byte = file.read(1)
                    file.seek(-200, os.SEEK_END)
                    file.write(bytes([byte[0] ^ 1]))
            os.kill(os.getpid(), signal.SIGKILL)
        self._here(f"update:{gradients.iteration}")

    def before_publish(self, iteration: int, folder: Path) -> None:
        """All bytes of the checkpoint are written, and it does not count yet."""
        self._here(f"save:{iteration}")
