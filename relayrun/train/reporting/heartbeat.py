"""A sign of life per node, in attempts/N/heartbeat/NODE.json, by the node's first rank.

It comes once a second. Where an agent of the node sees by its pages of memory how far the ranks are
(`reporting.sections`), the file is for people and for who asks from outside whether the attempt lives: it comes once
a minute, and at once where training begins or, after a rewind, begins anew.

It is written by the main thread where that makes progress, never by a thread of its own: that would beat
on while the main thread hangs. Not synced to disk: an old beat after a crash misleads nobody, since
the attempt is over. Standard library only, so that the first beat comes before torch is imported.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from relayrun.control.rundir.records import Heartbeat
from relayrun.files import write_json
from relayrun.train.reporting.sections import SectionReporter
from relayrun.train.reporting.timings import Timings

log = logging.getLogger(__name__)

Phase = Literal["start", "step", "save", "evaluation"]

HEARTBEAT_SECONDS = 1.0
"""Between two beats of one phase."""
RARE_HEARTBEAT_SECONDS = 60.0
"""Between two beats where the agent of the node looks for hangs; whoever reads them waits for so much longer."""


def node_name(environment: Mapping[str, str]) -> str:
    """Slurm's name of this node, or the host's where there is no Slurm."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


class HeartbeatWriter:
    """Writes the heartbeat of this node; does nothing where `active` is False.

    `rare`: the agent of this node sees how far its ranks are without it.
    """

    def __init__(
        self, folder: Path, *, node: str, active: bool, iteration: int, timings: Timings, rare: bool = False
    ) -> None:
        self._folder = folder
        self.node = node
        self._active = active
        self._rare = rare
        self._iteration = iteration
        self._phase: Phase = "start"
        self._timings = timings
        self._last: float | None = None
        """When it was last written, by the monotonic clock."""
        self._failing = False
        self.sections: SectionReporter | None = None
        """What the agent of this node is told besides, on every rank, once the config is known."""

    @property
    def phase(self) -> Phase:
        """What the main thread does now; `start` until the first step."""
        return self._phase

    def enter(self, phase: Phase, iteration: int) -> None:
        """The main thread now does `phase`, with `iteration` iterations behind it."""
        if phase != self._phase and (not self._rare or "start" in (phase, self._phase)):
            self._last = None
        self._phase, self._iteration = phase, iteration
        if self.sections is not None:
            self.sections.enter(phase, iteration)
        self.beat()

    def beat(self) -> None:
        """The main thread came further within its phase."""
        if self.sections is not None:
            self.sections.touch()
        now = time.monotonic()
        if not self._active or (
            self._last is not None and now - self._last < (RARE_HEARTBEAT_SECONDS if self._rare else HEARTBEAT_SECONDS)
        ):
            return
        self._last = now
        beat = Heartbeat(
            node=self.node,
            iteration=self._iteration,
            phase=self._phase,
            time=time.time(),
            step_p95=self._timings.step_p95,
            save_p95=self._timings.save_p95,
            interval=RARE_HEARTBEAT_SECONDS if self._rare else 0.0,
        )
        try:
            self._folder.mkdir(exist_ok=True)
            write_json(self._folder / f"{self.node}.json", asdict(beat), durable=False)
            self._failing = False
        except OSError as error:  # a full disk is no reason to stop; one line says it
            if not self._failing:
                log.warning("heartbeat of %s not written: %s", self.node, error)
            self._failing = True


def is_first_of_node() -> bool:
    return os.environ["LOCAL_RANK"] == "0"
