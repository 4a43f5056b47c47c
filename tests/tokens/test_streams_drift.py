"""Lanes of a group that come through its blocks at different speed, as filters may make them.

Rows are dealt in turn here: shares of equal bytes would keep these lanes together.
"""

from __future__ import annotations

import json
import random
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from relayrun.errors import FatalTrainingError
from relayrun.tokens.streams import text_stream
from relayrun.tokens.streams.text_stream import TextStream
from tests.streaming import digest, stream, write

LONG_IN_TURN = [("long " * 60 if row % 2 else "short") + f" {row}" for row in range(90)]
AT_RANDOM = [f"{row} " * random.Random(row).randint(1, 60) for row in range(90)]


@pytest.fixture(autouse=True)
def _in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_stream, "share_rows", lambda order, _, lanes, __: [order[n::lanes] for n in range(lanes)])


def made(folder: Path, texts: Sequence[str], **options: object) -> TextStream:
    """A stream of two lanes that share a file, four rows of a block each."""
    write(folder, "parquet", [len(texts)], extra=dict(enumerate(texts)))
    return stream(folder, "parquet", lanes=2, shuffle_buffer=0, **options)


def read(of: TextStream, samples: int) -> tuple[list[str], int]:
    """Samples of both lanes in turn, each with its lane's cursor, and how many blocks were there at the end."""
    lanes = of.open_lanes(dict(enumerate(of.first_cursors())))
    with pytest.MonkeyPatch.context() as patch:
        known: list[weakref.ref[text_stream.RowBlock]] = []
        make = of.blocks._block

        def made(*given: Any) -> text_stream.RowBlock:
            block = make(*given)
            known.append(weakref.ref(block))
            return block

        patch.setattr(of.blocks, "_block", made)
        found = [digest(lanes.take(number % 2)) + json.dumps(lanes.cursor(number % 2)) for number in range(samples)]
        there = sum(one() is not None for one in known)
    lanes.close()
    return found, there


@pytest.mark.parametrize(
    ("texts", "prefetch"), [(LONG_IN_TURN, 2), (LONG_IN_TURN, 0), (AT_RANDOM, 2)], ids=["in-turn", "alone", "at-random"]
)
def test_lanes_that_drift_apart_keep_few_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str], prefetch: int
) -> None:
    monkeypatch.setattr(text_stream, "MIN_ROWS_PER_LANE", 4)
    of = made(tmp_path, texts, nb_prefetch=prefetch)
    monkeypatch.setattr(text_stream, "MAX_WAITING_BLOCKS", 10**9)
    expected, kept = read(of, 900)
    monkeypatch.setattr(text_stream, "MAX_WAITING_BLOCKS", 1)
    found, few = read(of, 900)
    assert found == expected
    assert few <= 1 + prefetch + 4
    assert kept > 12 or texts is AT_RANDOM, "without a bound they are many"


def test_a_lane_that_is_behind_ends_with_the_last_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other lane has come to the end before, and every row has come once an epoch."""
    monkeypatch.setattr(text_stream, "MIN_ROWS_PER_LANE", 4)
    ends = []
    for most in (1, 10**9):
        monkeypatch.setattr(text_stream, "MAX_WAITING_BLOCKS", most)
        lanes = (of := made(tmp_path, LONG_IN_TURN, nb_epochs=3)).open_lanes(dict(enumerate(of.first_cursors())))
        found: dict[int, list[str]] = {0: [], 1: []}
        for lane in (0, 1):
            with pytest.raises(FatalTrainingError, match="is read to the end of its epoch 3"):
                found[lane].extend(digest(lanes.take(lane)) + json.dumps(lanes.cursor(lane)) for _ in range(10**6))
        lanes.close()
        ends.append(found)
    assert ends[0] == ends[1]
    assert min(map(len, ends[0].values())) > 10
