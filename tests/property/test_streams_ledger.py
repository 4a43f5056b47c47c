"""The ledger of streams by brute force, from the raw files alone: kills, numbers of replicas, batch sizes, mixtures.

A run is simulated as the ranks have it. Every replica reads its lanes some iterations ahead; saves gather the cursors
of an earlier sample; a kill goes back to a save. The next attempt may have another number of replicas, another batch
size and another mixture.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.config.sections.data import DocumentWindowSection
from relayrun.tokens.order.sampler import MixtureSampler
from relayrun.tokens.streams import text_stream
from relayrun.tokens.streams.lane_cursor import LaneCursor
from tests import streaming
from tests.streaming import numbers_in, sampler, stream, write

LANES = 8
SAMPLES = 260
WINDOW = DocumentWindowSection(window=48, packing="best_fit")


class Numbered:
    """Token shards, in place of real ones."""

    def __len__(self) -> int:
        return 50

    def read(self, epoch: int, i: int) -> Any:
        return np.full(streaming.SEQ_LENGTH + 1, 200 + i)


@dataclass
class Ledger:
    """What was trained on, as the last of all replays had it."""

    samples: dict[int, str] = field(default_factory=dict)
    """Hash of each global sample."""
    texts: dict[int, tuple[str, int, int, int, str]] = field(default_factory=dict)
    """Each sample of a stream: data set, lane, epoch, block, and its text."""

    def forget(self, end: int) -> None:
        """Another mixture gives the samples from `end` on another meaning."""
        self.samples = {k: sample for k, sample in self.samples.items() if k < end}
        self.texts = {k: text for k, text in self.texts.items() if k < end}

    def add(self, order: MixtureSampler, reading: Any, k: int) -> None:
        row = reading.row(k)
        same = self.samples.setdefault(k, streaming.digest(row))
        assert same == streaming.digest(row), f"sample {k} is another one in this layout"
        name, _ = order.schedule.locate(k)
        if name in order.streams:
            lane = order.schedule.number_in_phase(k) % LANES
            cursor = LaneCursor(*reading._open[name].cursor(lane))
            self.texts[k] = (name, lane, cursor.epoch, cursor.number, streaming.inputs(row))


def run(folder: Path, seed: int) -> tuple[Ledger, MixtureSampler, dict[str, set[int]]]:
    """A run of `SAMPLES` samples through a random history; the rows that each stream has."""
    generator = random.Random(seed)
    sizes = {
        "web": [generator.randint(1, 40) for _ in range(generator.choice([1, 3, 20]))],
        "code": [generator.randint(5, 30) for _ in range(generator.choice([2, 9]))],
    }
    kinds = {name: generator.choice(["parquet", "jsonl", "arrow"]) for name in sizes}
    for name, files in sizes.items():  # no lane may be without a row
        files[0] += max(0, 3 * LANES - sum(files))
        write(folder / name, kinds[name], files)
    options: dict[str, dict[str, Any]] = {
        name: {
            "shuffle_buffer": generator.choice([0, 20, 100]),
            "fragment_shuffle_window": generator.choice([0, 1, 5, -1]),
            "files_circular_shift": generator.random() < 0.5,
            "nb_prefetch": generator.choice([0, 1, 2]),
        }
        for name in sizes
    }

    def mixture(weights: dict[str, float]) -> MixtureSampler:
        parts: dict[str, Any] = {
            name: stream(folder / name, kinds[name], name=name, lanes=LANES, window=WINDOW, **options[name])
            for name in sizes
            if name in weights
        }
        return sampler(parts | {"tokens": Numbered()}, weights)

    def weights() -> dict[str, float]:
        names = generator.sample(["web", "code", "tokens"], generator.randint(1, 3))
        return {name: generator.choice([1.0, 0.3, 2.5]) for name in sorted({*names, "web"})}

    ledger, shares = Ledger(), weights()
    order = mixture(shares)
    saved: list[tuple[int, str]] = [(0, json.dumps(order.state(0)))]
    while saved[-1][0] < SAMPLES:
        del saved[max(1, len(saved) - generator.choice([0, 0, 1])) :]  # the newest may be lost
        consumed, state = saved[-1]
        phases = order.schedule.to_json()
        shares = weights() if generator.random() < 0.3 else shares
        order = mixture(shares)
        assert order.resume(json.loads(state)) == consumed
        if order.schedule.to_json() != phases:
            ledger.forget(consumed)
        attempt(generator, ledger, order, consumed, saved)
    ledger.forget(saved[-1][0])
    order.resume(json.loads(saved[-1][1]))
    return ledger, order, {name: set(range(sum(files))) for name, files in sizes.items()}


def attempt(
    generator: random.Random, ledger: Ledger, order: MixtureSampler, consumed: int, saved: list[tuple[int, str]]
) -> None:
    """Some iterations of an attempt, which a kill ends. Its saves are put behind those of the others."""
    replicas = generator.choice([1, 2, 4, 8])
    readings = [order.lane_reader(consumed, replica, replicas) for replica in range(replicas)]
    ahead = [consumed] * replicas  # the sample that each reads next
    for _ in range(generator.randint(1, 6)):
        size = replicas * generator.randint(1, 24 // replicas)
        end = consumed + size
        for replica, reading in enumerate(readings):
            assert len(reading.numbers(consumed, end)) == size // replicas
            more = end + generator.choice([0, 0, 2 * size])
            for k in reading.numbers(ahead[replica], more):
                ledger.add(order, reading, k)
            ahead[replica] = max(more, ahead[replica])
        consumed = end
        if generator.random() < 0.6:
            cursors = [reading.cursors(consumed) for reading in readings]
            saved.append((consumed, json.dumps(order.state(consumed, cursors))))
    for reading in readings:
        reading.close()


def check(folder: Path, seed: int) -> None:
    ledger, order, rows = run(folder, seed)
    assert sorted(ledger.samples) == list(range(len(ledger.samples)))
    assert len(ledger.samples) >= SAMPLES
    per_block: dict[tuple[str, int, int, int], str] = defaultdict(str)
    for _, (name, lane, epoch, block, text) in sorted(ledger.texts.items()):
        per_block[name, lane, epoch, block] += text
    for name in {name for name, *_ in ledger.texts.values()}:
        cursors = [LaneCursor(*cursor) for cursor in order.lane_positions[name].cursors]
        whole = min(cursor.epoch for cursor in cursors)
        found: list[Counter[int]] = [Counter() for _ in range(1 + max(cursor.epoch for cursor in cursors))]
        for (of, lane, epoch, block), text in per_block.items():
            if of == name:
                pieces = [piece for piece in text.split("\0") if piece]
                if epoch < whole or (epoch, block) < (cursors[lane].epoch, cursors[lane].number):
                    found[epoch].update(numbers_in(text))
                else:
                    assert all(piece.startswith("<") for piece in pieces)
        for epoch, counted in enumerate(found):
            assert max(counted.values(), default=0) <= 1, (name, epoch)
            if epoch < whole:
                assert set(counted) == rows[name], (name, epoch)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_stream, "MIN_ROWS_PER_LANE", 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_every_row_comes_once_an_epoch_through_kills_and_changes(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 103))
def test_every_row_comes_once_an_epoch_through_a_hundred_histories(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed)
