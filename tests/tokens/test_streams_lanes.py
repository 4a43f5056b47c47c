"""Texts of several lanes are encoded together: which lanes' they are, and that nothing else changes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from relayrun.errors import FatalTrainingError
from relayrun.tokens.order.sampler import Cursor
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.streams import text_stream
from relayrun.tokens.streams.lane_cursor import BlockStart, LaneCursor
from relayrun.tokens.streams.samples import encode_texts
from relayrun.tokens.streams.text_stream import TextStream
from relayrun.tokens.tokenize.encode.libraries import Encoded
from relayrun.tokens.tokenize.encode.routing import texts_holding_bytes
from tests import streaming
from tests.streaming import numbers_in, stream, write


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_stream, "MIN_ROWS_PER_LANE", 3)


def watched(made: TextStream) -> list[list[int]]:
    """Rows of each call of the engine, from now on."""
    calls: list[list[int]] = []

    def encode(texts: PackedTexts) -> Encoded:
        calls.append(sorted(numbers_in("\0".join([*texts.strings(), ""]))))
        return streaming.encode(texts)

    made.encode = encode
    return calls


def samples(made: TextStream, lanes: list[int], count: int) -> list[tuple[str, list[int]]]:
    """Each sample and the cursor behind it, in turns."""
    first = made.first_cursors()
    opened = made.open_lanes({lane: first[lane] for lane in lanes})
    found = [(streaming.digest(opened.take(lane)), opened.cursor(lane)) for _ in range(count) for lane in sorted(lanes)]
    opened.close()
    return found


def test_lanes_of_a_block_are_encoded_together_and_alone_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "parquet", [40, 30, 50])
    made = stream(tmp_path, "parquet", shuffle_buffer=40)
    together_calls = watched(made)
    together = samples(made, [0, 1, 2, 3], 8)
    monkeypatch.setattr(text_stream, "ENCODE_BATCH_BYTES", 1)
    alone_calls = watched(made)
    assert samples(made, [0, 1, 2, 3], 8) == together
    assert len(together_calls) * 4 == len(alone_calls)
    assert len(together_calls[0]) == 40
    assert len(alone_calls[0]) == 10


@pytest.mark.parametrize("settings", [{}, {"fragment_shuffle_window": 0, "shuffle_buffer": 0}, {"nb_prefetch": 0}])
def test_a_lane_is_encoded_in_pieces_whose_samples_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int]
) -> None:
    """100 rows of a block for each lane, and 32 at a time; read on from everywhere."""
    write(tmp_path, "parquet", [300, 500], group=90)
    monkeypatch.setattr(text_stream, "MIN_ROWS_PER_LANE", 100)
    made = stream(tmp_path, "parquet", **{"shuffle_buffer": 400, **settings})

    def read(lane: int, cursor: Cursor, count: int) -> list[tuple[Any, ...]]:
        opened = made.open_lanes({lane: cursor, (lane + 1) % 4: cursor})
        found = [(streaming.digest(opened.take(lane)), opened.origins(lane), opened.cursor(lane)) for _ in range(count)]
        opened.close()
        return found

    first = made.first_cursors()[0]
    whole = [read(lane, first, 150) for lane in (0, 3)]
    monkeypatch.setattr(text_stream, "ENCODE_BATCH_BYTES", 100)
    calls = watched(made)
    read(0, first, 1)
    assert [len(call) for call in calls] == [32], "for the first sample"
    assert [read(lane, first, 150) for lane in (0, 3)] == whole
    for at in range(0, 100, 7):
        assert [read(lane, known[at][2], 40) for lane, known in zip((0, 3), whole, strict=True)] == [
            known[at + 1 : at + 41] for known in whole
        ]


@pytest.mark.parametrize(
    "settings", [{}, {"min_len": 12}, {"map": f"{__name__}:drops_some"}], ids=["all", "length", "map"]
)
def test_a_resume_encodes_no_text_before_its_place_and_counts_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """300 rows of a block for each lane; some have no text. The cursors behind it are those of one reading."""
    write(tmp_path, "parquet", [700, 700, 700], group=90, extra=dict.fromkeys(range(3, 2100, 11), ""))
    monkeypatch.setattr(text_stream, "MIN_ROWS_PER_LANE", 300)
    monkeypatch.setattr(text_stream, "ENCODE_BATCH_BYTES", 100)
    made = stream(tmp_path, "parquet", shuffle_buffer=1200, **settings)
    whole = [found for _, found in samples(made, [0, 2], 320)][::2]
    late = max(at for at in range(320) if whole[at][:2] == (0, 0))
    assert LaneCursor(*whole[late]).rows_before > 280
    for at in range(late - 24, late, 3):
        calls = watched(made)
        opened = made.open_lanes({0: whole[at], 2: made.first_cursors()[2]})
        opened.take(0)
        assert [len(call) <= 64 for call in calls] == [True], "32 rows of each lane"
        found = [opened.cursor(0), *((opened.take(0), opened.cursor(0))[1] for _ in range(319 - at - 1))]
        opened.close()
        assert found == whole[at + 1 :]


def test_a_place_beyond_its_block_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [40])
    made = stream(tmp_path, "parquet", shuffle_buffer=40)
    opened = made.open_lanes({0: LaneCursor(taken=1, rows_before=10)})
    with pytest.raises(FatalTrainingError, match="no block"):
        opened.take(0)
    opened.close()


def test_the_next_block_is_read_behind_the_first_samples(tmp_path: Path) -> None:
    """Before them, it took a fifth of the time to the first batch of a resume; behind the first two, which are read
    ahead for batches, up to half where the processors are busy."""
    write(tmp_path, "parquet", [40, 40, 40], group=10)
    opened = stream(tmp_path, "parquet", lanes=2, name="read-behind").open_lanes({0: LaneCursor(), 1: LaneCursor()})

    def reads() -> bool:
        return any(thread.name.startswith("read-behind") for thread in threading.enumerate())

    for lane in (0, 1) * 3:
        opened.take(lane)
        assert not reads()
    opened.take(0)
    assert reads()
    opened.close()


def test_no_lane_of_another_rank_is_encoded(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [40, 30, 50])
    mine, others = (stream(tmp_path, "parquet", nb_epochs=1, shuffle_buffer=40) for _ in range(2))
    calls, their_calls = watched(mine), watched(others)
    samples(mine, [1, 3], 5)
    samples(others, [0, 2], 5)
    rows, their_rows = ({row for call in found for row in call} for found in (calls, their_calls))
    assert rows
    assert their_rows
    assert not rows & their_rows


def drops_some(row: dict[str, str]) -> str | None:
    return None if int(row["text"][1:6] or 0) % 5 == 2 else row["text"]


def refuses_row_7(row: dict[str, str]) -> str:
    if row["text"].startswith("<00007>"):
        raise ValueError("no seven")
    return row["text"]


def test_what_a_map_raises_for_another_lane_is_raised_when_that_lane_comes_to_it(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [40])
    made = stream(tmp_path, "parquet", shuffle_buffer=0, fragment_shuffle_window=0, map=f"{__name__}:refuses_row_7")
    opened = made.open_lanes(dict(enumerate(made.first_cursors())))
    shares = next(made.blocks.read(0, BlockStart(0, 0, 0, 0))).shares
    (refused,) = (lane for lane, rows in enumerate(shares) if 7 in rows)
    for lane in {0, 1, 2, 3} - {refused}:
        opened.take(lane)
    with pytest.raises(FatalTrainingError, match="no seven"):
        opened.take(refused)
    opened.close()


def test_ids_are_dealt_to_the_arrays_that_they_are_of() -> None:
    parts = [["ab", "", "cde"], [], [""], ["f" * 50], ["gh", "i"]]
    arrays = [pa.chunked_array([[*part[:1]], [*part[1:]]], pa.large_string()) for part in parts]
    for (ids, lengths), part in zip(encode_texts(arrays, streaming.encode), parts, strict=True):
        wanted_ids, wanted_lengths = streaming.encode(PackedTexts.of(part))
        assert np.array_equal(ids, wanted_ids)
        assert np.array_equal(lengths, wanted_lengths)


@pytest.mark.parametrize("needle", [b"<|", "\u017f".encode(), "\u212a".encode()])
def test_a_needle_is_found_whatever_its_bytes(needle: bytes) -> None:
    word = needle.decode()
    texts = PackedTexts.of(["plain", f"a{word}b", "", "é", word, word[0]])
    assert texts_holding_bytes(texts, (needle,)).tolist() == [word in text for text in texts.strings()]
    assert not texts_holding_bytes(PackedTexts.of(["plain", ""]), (needle,)).any()
    assert not texts_holding_bytes(PackedTexts.of([]), (needle,)).any()


@pytest.mark.parametrize("shuffle_buffer", [128, 0])
def test_lanes_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle_buffer: int) -> None:
    """Texts whose lengths differ as those of the web do: lanes with shares by chance come apart by more and more
    blocks, and then read some of them again."""
    monkeypatch.setattr(text_stream, "MIN_ROWS_PER_LANE", 32)
    lengths = np.random.default_rng(1).lognormal(5, 1, 6_400).astype(int)
    write(tmp_path, "parquet", [6_400], group=1000, extra={row: "y" * int(n) for row, n in enumerate(lengths)})
    made = stream(tmp_path, "parquet", shuffle_buffer=shuffle_buffer, fragment_shuffle_window=0)
    opened = made.open_lanes(dict(enumerate(made.first_cursors())))
    apart = []
    for _ in range(int(lengths.sum()) // 64 // 4 * 97 // 100):
        for lane in range(4):
            opened.take(lane)
        numbers = [LaneCursor(*opened.cursor(lane)).number for lane in range(4)]
        apart.append(max(numbers) - min(numbers))
    opened.close()
    assert max(numbers) > 45
    assert max(apart) == 1
    assert np.mean(apart) < 0.3
