"""A rank's whole state in the memory of its own node and of the next node, for restarts inside the job.

`CopyInterval` says how often the state is copied: as configured, or as often as 2 % of the steps' time allow.

A copy holds what the rank itself has of the state: the parts of model and optimizer, its generators, and the plain
values of a checkpoint. So it fits the layout of this job alone. It counts for a round when every rank has one of the
same iteration, its own or a neighbour's, and is put in place only if every rank finds the bytes that were written.

    cost = (seconds that training waits for a copy + by which steps beside it are longer) / (k · seconds of a step)

The smallest k for which that is below 2 % is taken, but none below 2, nor below twice the time of the neighbour's copy:
else the next one would wait for it, or no step be left to compare with that is not beside one. What is measured is the
most of all ranks, so that all take the same k. The state does not depend on it: a copy changes nothing, and a round
from an earlier copy computes the same again.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections import deque
from dataclasses import asdict, dataclass
from math import ceil, floor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import xxhash
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.training import BatchSizes
from relayrun.control.agent.memory_copies import SLOTS_PER_RANK, MemorySlot, NodeMemoryFullError
from relayrun.control.rundir.attempt import Attempt
from relayrun.errors import InputError
from relayrun.files import append_line, read_lines_backwards
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.train.checkpoint.checkpointer import Checkpointer
from relayrun.train.checkpoint.memory_replication import (
    MemoryCopy,
    NeighbourReplica,
    discard_later_copies,
    whole_copy,
    write_copy,
)
from relayrun.train.distributed import Ranks
from relayrun.train.reporting.metrics import Metrics

COPY_TIME_SHARE = 0.02
"""What copies may cost of the steps' time."""
SHORTEST_INTERVAL = 2
"""Steps between copies: the one that follows a copy is beside it, and another one is to compare with."""
FIRST_INTERVAL = 2
"""Copies that are not measured: each is the first one in its slot, whose memory is new."""
NEWEST_COPIES = 9
"""Copies whose median counts."""
USUAL_STEPS = 99
"""Steps without a copy beside them whose median counts."""
INTERVAL_SLACK = 0.75
"""A shorter interval is taken only below this part of the present one: measurements vary."""


@dataclass(frozen=True, kw_only=True)
class CopyTimes:
    """Seconds at the median of the newest copies and steps, on the slowest rank."""

    copy: float
    """Training waits for one so long."""
    beside: float
    """Steps beside the way of one take so much longer, all of them together."""
    neighbour: float
    """One is on its way to the next node so long, beside the steps; 0 where there is none."""
    step: float

    @property
    def interval(self) -> int:
        """The smallest number of steps between copies that costs less than SHARE of their time, and waits for none."""
        each = 1 + floor((self.copy + self.beside) / (COPY_TIME_SHARE * self.step))
        return max(SHORTEST_INTERVAL, each, ceil(2 * self.neighbour / self.step))

    def cost(self, interval: int) -> float:
        """What a copy every `interval` steps costs, as a part of the steps' time."""
        return (self.copy + self.beside) / (interval * self.step)


class StepSlowdown:
    """By how much a copy makes the steps longer that run while it is on its way to the next node.

    It takes processors, memory and network from them. So does the first step after a copy that goes nowhere: the caches
    hold what was copied. Steps are compared with those of a batch of the same size.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=USUAL_STEPS)
        self._beside: list[float] = []
        self._under_way = False
        self._samples = 0

    def copied(self) -> None:
        """A copy was made; the next step runs beside it."""
        self._beside.clear()
        self._under_way = True

    def stepped(self, seconds: float, *, samples: int, under_way: bool) -> None:
        """A step over so many samples took so long.

        `under_way`: the copy still is on its way, so that the next step is beside it.
        """
        if samples != self._samples:
            self._samples = samples
            self._usual.clear()
            self._beside.clear()
        (self._beside if self._under_way else self._usual).append(seconds)
        self._under_way = under_way

    @property
    def longer(self) -> float:
        """Seconds, of all steps beside the last copy; below 0 where they were shorter, 0 where nobody knows."""
        return sum(self._beside) - len(self._beside) * median(self._usual) if self._usual else 0.0


class CopyInterval:
    """When the next copy is due; the same on all ranks.

    Args:
        asked: steps between copies; None: they are chosen.
        at: the iteration from which training starts, of which there is a copy, or the checkpoint.
        known: the interval that an earlier round of this attempt had chosen.
    """

    def __init__(self, asked: int | None, *, at: int, known: int | None = None) -> None:
        self._chosen = asked is None
        self.steps = asked or max(SHORTEST_INTERVAL, known or SHORTEST_INTERVAL)
        self._last = at
        self._copies: deque[float] = deque(maxlen=NEWEST_COPIES)
        self._beside: deque[float] = deque(maxlen=NEWEST_COPIES)
        self._neighbours: deque[float] = deque(maxlen=NEWEST_COPIES)
        self._unmeasured = FIRST_INTERVAL

    def due(self, iteration: int) -> bool:
        """Whether the state of this iteration is to be copied."""
        self._last = min(self._last, iteration)  # training may have gone back
        if iteration == self._last:
            return False
        return iteration - self._last >= self.steps if self._chosen else iteration % self.steps == 0

    def copied(self, iteration: int, *, copy: float, beside: float, neighbour: float, step: float) -> CopyTimes | None:
        """A copy was made, at these seconds (those of a step at the median); return why the interval is now another.

        None where it stays what it was. `beside`, `neighbour`: of the copy before this one.
        """
        self._last = iteration
        if not self._chosen or step <= 0:
            return None
        if self._unmeasured:
            self._unmeasured -= 1
            return None
        for seen, seconds in ((self._copies, copy), (self._beside, beside), (self._neighbours, neighbour)):
            seen.append(seconds)
        measured = CopyTimes(
            copy=median(self._copies),
            beside=max(0.0, median(self._beside)),
            neighbour=median(self._neighbours),
            step=step,
        )
        wanted = measured.interval
        if len(self._copies) > 1 and INTERVAL_SLACK * self.steps < wanted <= self.steps:
            return None
        self.steps = wanted
        return measured


log = logging.getLogger(__name__)


class MemoryTier:
    """The copies of one rank. Every method is called by all ranks together."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        attempt: Attempt,
        checkpointer: Checkpointer,
        ranks: Ranks,
        *,
        metrics: Metrics,
    ) -> None:
        """`folder`: of the agent, in memory."""
        self._checkpointer, self._ranks, self._attempt, self._metrics = checkpointer, ranks, attempt, metrics
        self._asked = config.checkpoint.memory_interval
        self._slots = [MemorySlot(folder, ranks.rank, number) for number in range(SLOTS_PER_RANK)]
        per_node = config.job.ntasks_per_node
        self._neighbour = NeighbourReplica(folder, ranks, per_node=per_node) if per_node < ranks.world_size else None
        self._on = True
        self.source = "memory"
        """Where the state was that `load` has put in place: there, or with a `neighbour`."""

    def begin(self, iteration: int) -> None:
        """Training goes on from here; `due` may be asked from now on."""
        known = self._ranks.on_first_rank(self._known, InputError) if self._asked == "auto" else None
        asked = None if self._asked == "auto" else self._asked
        self._interval, self._steps = CopyInterval(asked, at=iteration, known=known), StepSlowdown()

    def due(self, iteration: int) -> bool:
        """Whether the state of this iteration is to be copied."""
        return self._on and self._interval.due(iteration)

    def stepped(self, seconds: float, *, samples: int) -> None:
        """A step over so many samples took so long."""
        under_way = self._neighbour is not None and self._neighbour.under_way
        self._steps.stepped(seconds, samples=samples, under_way=under_way)

    @torch.no_grad()
    def save(self, position: TrainingProgress, *, step_seconds: float) -> float:
        """Copy the state as it is now, and begin to send it to the neighbour; return the seconds that training waited.

        At every moment one iteration is whole everywhere: no rank overwrites a copy before all have the next one, and
        before their neighbours have it. Where a rank has no room, it says so once, and all go on without copies.
        `step_seconds`: of a step, usually; 0 where that is not known yet.
        """
        started = time.perf_counter()
        sent = 0.0
        if self._neighbour is not None:
            self._neighbour.wait()
            sent = self._neighbour.seconds
            self._metrics.sync()  # the copy outlives this node, and must not be ahead of the record that does
            self._ranks.maximum([0])  # only when the last copy has come everywhere may the one before it be overwritten
        written = None
        try:
            written = self._write(position.iteration, self._checkpointer.state(position))
        except (NodeMemoryFullError, OSError) as error:
            words = "no copies in memory: %s; rounds start from the disk"
            log.warning("rank %s: " + words, self._ranks.rank, error)
        figures = [
            int(written is None),
            *(int(1e6 * each) for each in (time.perf_counter() - started, self._steps.longer, sent, step_seconds)),
        ]
        failed, *measured = self._ranks.maximum(figures)
        if failed:
            self._on = False
            self.void()
        else:
            copy, beside, neighbour, step = (each / 1e6 for each in measured)
            changed = self._interval.copied(
                position.iteration, copy=copy, beside=beside, neighbour=neighbour, step=step
            )
            self._steps.copied()
            if changed is not None and self._ranks.rank == 0:
                self._note(position.iteration, changed)
            if self._neighbour is not None and written is not None:
                self._neighbour.begin(written)
        return time.perf_counter() - started

    def finish(self) -> None:
        """Wait for what is under way."""
        if self._neighbour is not None:
            self._neighbour.wait()

    def void(self, *, after: int = -1) -> None:
        """Let no copy count that is later than iteration `after`: training goes back on purpose, or has gone back.

        Later copies are of steps that are computed again, and must not be mixed with those of the second time.
        """
        discard_later_copies(self._slots, after=after)
        if self._neighbour is not None:
            self._neighbour.void(after=after)

    def load(self, iteration: int, sizes: BatchSizes) -> TrainingProgress | None:
        """Put the copies of this iteration in place; return where they stand.

        None, on every rank, where one of them has not what it wrote, nor its neighbour; then nothing has changed.
        """
        found = self._find(iteration)
        wanted = self._checkpointer.wanted()
        bad = found is None or found.header["layout"] != _layout(_parts_of_load(wanted)[0])
        if bad:
            log.warning("rank %s: no copy of iteration %s in memory is what was written", self._ranks.rank, iteration)
        if self._ranks.maximum([int(bad)])[0]:
            return None
        assert found is not None
        self.void(after=iteration)
        plain, body = found.body[: found.header["plain"]].tobytes(), found.body[found.header["plain"] :]

        def fill(wanted: ShardedStateDict, plain: dict[str, Any]) -> dict[str, Any]:
            parts, nonpersistent, factories = _parts_of_load(wanted)
            at = 0

            def value(part: ShardedBase) -> Any:
                nonlocal at
                if isinstance(part, ShardedTensor):
                    size = part.data.nbytes
                    made = torch.from_numpy(body[at : at + size].copy()).view(part.data.dtype).view(part.data.shape)
                else:
                    size = int(body[at : at + 8].view(np.int64)[0])
                    at += 8
                    made = torch.load(io.BytesIO(body[at : at + size].tobytes()), weights_only=True)
                at += size
                return made

            loaded = dict_list_map_outplace(value, parts)
            merge(plain, nonpersistent)
            merge(plain, loaded)
            state: dict[str, Any] = apply_factory_merges(plain, factories)
            return state

        return self._checkpointer.put(torch.load(io.BytesIO(plain), weights_only=True), sizes, fill)

    def _write(self, iteration: int, state: ShardedStateDict) -> MemoryCopy:
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        parts = list(nested_values(sharded))
        plain = _packed(common)
        pieces: list[torch.Tensor | bytes] = [plain]
        for part in parts:
            if isinstance(part, ShardedTensor):
                pieces.append(part.data.detach())
            else:
                packed = _packed(part.data)
                pieces.append(np.int64(len(packed)).tobytes() + packed)
        size = sum(piece.nbytes if isinstance(piece, torch.Tensor) else len(piece) for piece in pieces)
        slot = min(self._slots, key=lambda slot: (slot.header() or {"iteration": -1})["iteration"])
        for each in self._slots:
            each.reserve(size)
        header = {"rank": self._ranks.rank, "ranks": self._ranks.world_size, "iteration": iteration}
        return write_copy(slot, pieces, **header, size=size, plain=len(plain), layout=_layout(sharded))

    def _known(self) -> int | None:
        """The interval that was chosen last in this attempt."""
        lines = read_lines_backwards(self._attempt.memory_intervals)
        return next((int(line["interval"]) for _, line in lines), None)

    def _note(self, iteration: int, measured: CopyTimes) -> None:
        """On rank 0: say how often the state is copied from now on, and why. On a full disk training goes on."""
        steps = self._interval.steps
        cost = measured.cost(steps)
        self._metrics.say(
            f"iteration {iteration}: copies in memory every {steps} iterations, at {100 * cost:.1f} % of their time "
            f"(a copy {measured.copy:.3f} s, and steps beside it {measured.beside:.3f} s longer; a step "
            f"{measured.step:.3f} s, the neighbour's {measured.neighbour:.3f} s)"
        )
        record = {"iteration": iteration, "interval": steps, "cost": cost, **asdict(measured), "time": time.time()}
        try:
            append_line(self._attempt.memory_intervals, record, durable=False)
        except OSError as error:
            log.warning("%s not written: %s", self._attempt.memory_intervals.name, error)

    def _find(self, iteration: int) -> MemoryCopy | None:
        """This rank's copy of an iteration, its own or else the neighbour's; None where neither is what was written."""
        rank, size = self._ranks.rank, self._ranks.world_size
        found = None
        for slot in self._slots:
            found = found or whole_copy(slot, rank=rank, ranks=size, iteration=iteration)
        if self._neighbour is None:
            return found
        lost = self._ranks.maximum([int(found is None and number == rank) for number in range(size)])
        if any(lost):
            self.source = "neighbour"
            brought = self._neighbour.bring(iteration, [bool(each) for each in lost], self._slots[0])
            return found or brought
        return found


def _parts_of_load(wanted: ShardedStateDict) -> tuple[ShardedStateDict, dict[str, Any], Any]:
    sharded, nonpersistent, factories = load_preprocess(wanted)
    return extract_sharded_base(sharded)[0], nonpersistent, factories


def _layout(sharded: ShardedStateDict) -> str:
    """A hash of what the parts are, in their order."""
    words = [
        [part.key, list(part.global_offset), list(part.data.shape), str(part.data.dtype)]
        if isinstance(part, ShardedTensor)
        else [part.unique_key]
        for part in nested_values(sharded)
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(words).encode())


def _packed(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
