"""Streams: which rows each lane reads, in which order, from where; what a cursor is; what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.config.sections.data import DocumentWindowSection
from relayrun.errors import ConfigError, FatalTrainingError, InputError
from relayrun.tokens.order.prefetcher import Prefetcher
from relayrun.tokens.order.sampler import MixtureSampler, OpenLanes
from relayrun.tokens.order.schedule import Interleave, RotatedInterleave, Schedule, integer_weights
from relayrun.tokens.streams import text_stream
from relayrun.tokens.streams.fragments import TEXT_COLUMN, group_count
from relayrun.tokens.streams.lane_cursor import BlockStart, LaneCursor
from relayrun.tokens.streams.text_stream import TextStream
from tests import streaming
from tests.streaming import numbers_in, sampler, stream, write


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_stream, "MIN_ROWS_PER_LANE", 3)


def texts(made: TextStream, lane: int, count: int) -> list[list[str]]:
    """The text of a lane's samples, by epoch and block; a zero ends a document."""
    opened = made.open_lanes({lane: made.first_cursors()[lane]})
    found: list[dict[int, str]] = [{} for _ in range(count)]
    for _ in range(streaming.MOST_SAMPLES):
        row = opened.take(lane)
        cursor = LaneCursor(*opened.cursor(lane))
        if cursor.epoch >= count:
            break
        found[cursor.epoch][cursor.number] = found[cursor.epoch].get(cursor.number, "") + streaming.inputs(row)
    opened.close()
    return [list(epoch.values()) for epoch in found]


def epochs(made: TextStream, lane: int, count: int) -> list[list[list[int]]]:
    """The rows of a lane, by epoch and block."""
    return [[numbers_in(text) for text in epoch] for epoch in texts(made, lane, count)]


def first_epoch(made: TextStream, lane: int) -> list[int]:
    """The rows of a lane in its first epoch, in their order."""
    return [row for block in epochs(made, lane, 1)[0] for row in block]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "arrow"])
@pytest.mark.parametrize("sizes", [[50], [9, 30, 1, 20], [5] * 20], ids=["one", "few", "many"])
def test_every_row_comes_once_an_epoch_whatever_the_files(tmp_path: Path, kind: str, sizes: list[int]) -> None:
    rows = {row for file in write(tmp_path, kind, sizes) for row in file}
    made = stream(tmp_path, kind, shuffle_buffer=20, fragment_shuffle_window=3)
    lanes = [epochs(made, lane, 2) for lane in range(4)]
    for epoch in range(2):
        found = [row for lane in lanes for block in lane[epoch] for row in block]
        assert Counter(found) == Counter(rows)
    assert lanes[0][0] != lanes[0][1]


def test_without_shuffles_rows_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    rows = [row for file in write(tmp_path, "parquet", [9, 30, 1]) for row in file]
    made = stream(tmp_path, "parquet", shuffle_buffer=0, fragment_shuffle_window=0, nb_prefetch=0)
    for lane in range(4):
        for block in epochs(made, lane, 1)[0]:
            assert block == [row for row in rows if row in block]
    found = sorted(row for lane in range(4) for row in first_epoch(made, lane))
    assert found == rows


def test_a_window_shuffles_fragments_inside_of_it_alone(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [28] * 4)
    order = {
        window: [
            (fragment.file, fragment.group)
            for fragment in stream(tmp_path, "parquet", fragment_shuffle_window=window).blocks._order.epoch_fragments(
                0, 0
            )
        ]
        for window in (0, 1, 8, -1)
    }
    assert order[0] == [(file, group) for file in range(4) for group in range(4)]
    files = [file for file, group in order[1] if group == 0]
    assert order[1] == [(file, group) for file in files for group in range(4)]
    assert files != [0, 1, 2, 3]
    assert set(order[8][:8]) == set(order[1][:8])
    assert order[8] != order[1]
    assert sorted(order[-1]) == order[0]
    assert set(order[-1][:8]) != set(order[1][:8])


def test_files_are_dealt_to_groups_of_lanes_evenly_or_in_runs(tmp_path: Path) -> None:
    """fairseq2 0.8.1 gave four ranks 11, 11, 7 and 7 of 36 files, with a shift."""
    write(tmp_path, "parquet", [2] * 36)
    for shift in (False, True):
        made = stream(tmp_path, "parquet", fragment_shuffle_window=0, files_circular_shift=shift)
        assert made.blocks.groups == 4
        shares = [[fragment.file for fragment in made.blocks._order.epoch_fragments(0, group)] for group in range(4)]
        assert [len(share) for share in shares] == [9] * 4
        assert shares[1] == (list(range(9, 18)) if shift else list(range(1, 36, 4)))
    assert [group_count(files, 64) for files in (1, 15, 16, 80, 600, 1733)] == [1, 1, 2, 8, 64, 64]
    assert group_count(1733, 192) == 192


@pytest.mark.slow
def test_a_lane_goes_on_from_its_cursor_as_if_nothing_had_been(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [9, 30, 1, 20])
    made = stream(tmp_path, "parquet", shuffle_buffer=20)
    whole = made.open_lanes({2: made.first_cursors()[2]})
    expected = [(whole.cursor(2), streaming.digest(whole.take(2))) for _ in range(40)]
    assert LaneCursor(*expected[-1][0]).epoch > 0
    whole.close()
    for at in range(0, 40, 7):
        again = stream(tmp_path, "parquet", shuffle_buffer=20).open_lanes({2: json.loads(json.dumps(expected[at][0]))})
        assert [streaming.digest(again.take(2)) for _ in range(at, 40)] == [sample for _, sample in expected[at:]]
        again.close()


def test_lanes_of_a_group_that_stand_in_different_blocks_go_on_each_from_its_own(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [90])
    made = stream(tmp_path, "parquet", shuffle_buffer=20)
    opened = made.open_lanes(dict(enumerate(made.first_cursors())))
    for lane, count in ((0, 9), (1, 1), (2, 4)):
        for _ in range(count):
            opened.take(lane)
    cursors = {lane: opened.cursor(lane) for lane in range(4)}
    assert len({cursor[1] for cursor in cursors.values()}) > 1
    expected = {lane: [streaming.digest(opened.take(lane)) for _ in range(6)] for lane in range(4)}
    again = made.open_lanes(cursors)
    assert {lane: [streaming.digest(again.take(lane)) for _ in range(6)] for lane in range(4)} == expected
    opened.close()
    again.close()


@pytest.mark.slow
def test_rows_that_options_leave_out_are_counted(tmp_path: Path) -> None:
    rows = write(tmp_path, "parquet", [60], extra={3: None, 4: None, 5: ""})[0]
    made = stream(tmp_path, "parquet", filters='pc.field("even") == True', min_len=10, max_len=40, shuffle_buffer=60)
    lengths = {row: len(streaming.text_of(row)) for row in rows}
    right = [row for row in rows if row % 2 == 0 and 10 <= lengths[row] <= 40 and row != 4]
    found = [row for lane in range(4) for row in first_epoch(made, lane)]
    assert sorted(found) == right
    opened = made.open_lanes(dict(enumerate(made.first_cursors())))
    counted = []
    for lane in range(4):
        for _ in range(streaming.MOST_SAMPLES):
            if LaneCursor(*opened.cursor(lane)).epoch:
                break
            opened.take(lane)
        counted.append(LaneCursor(*opened.cursor(lane)))
    opened.close()
    assert sum(cursor.rows for cursor in counted) == len(rows)
    assert sum(cursor.left_out for cursor in counted) == len(rows) - len(right)


def louder(row: dict[str, Any]) -> str | None:
    """A user's own function of a row: rows of which every third is left out, with their number before them."""
    return None if row["number"] % 3 == 0 else f"{row['number']}!{row['text']}"


def of_no_text(row: dict[str, Any]) -> Any:
    return len(row["text"])


def test_a_function_of_the_users_own_gives_the_text(tmp_path: Path) -> None:
    rows = write(tmp_path, "parquet", [60], extra={4: None})[0]
    here = "tests.tokens.test_streams:"
    made = stream(tmp_path, "parquet", map=f"{here}louder", extra_columns=["number"], filters="even == True")
    right = [f"{row}!{streaming.text_of(row)}" for row in rows if row % 2 == 0 and row % 3 and row != 4]
    found = [text for lane in range(4) for block in texts(made, lane, 1)[0] for text in block.split("\0") if text]
    assert sorted(found) == sorted(right)
    for name, words in (("of_no_text", "returned int, and no text"), ("missing", "cannot be imported")):
        opened = stream(tmp_path, "parquet", map=here + name).open_lanes({0: [*LaneCursor()]})
        with pytest.raises(FatalTrainingError, match=words):
            opened.take(0)
        opened.close()


def test_the_state_is_small(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [90])
    made = sampler({"web": stream(tmp_path, "parquet", lanes=64)}, {"web": 1})
    reading = made.lane_reader(0, 0, 1)
    for k in reading.numbers(0, 70):
        reading.row(k)
    state = made.state(70, [reading.cursors(70)])
    reading.close()
    assert len(json.dumps(state["streams"]["web"])) < 100 * 64


@pytest.mark.parametrize("packing", ["none", "pad", "split", "greedy", "first_fit", "best_fit"])
def test_windows_of_documents(tmp_path: Path, packing: Any) -> None:
    """Every text is in windows of 20 with two special tokens and an overlap of 3, each of them once an epoch."""
    rows = write(tmp_path, "parquet", [60])[0]
    window = DocumentWindowSection(
        window=20, overlap=3, bos=1, eos=2, drop_eod=True, mask_special=True, packing=packing
    )
    made = stream(tmp_path, "parquet", window=window)
    expected = Counter(
        f"\1{text[start : start + 18]}\2"
        for text in map(streaming.text_of, rows)
        for start in range(0, max(1, len(text) - 3), 15)
    )
    found: Counter[str] = Counter()
    for lane in range(4):
        opened = made.open_lanes({lane: made.first_cursors()[lane]})
        text = ""
        for _ in range(streaming.MOST_SAMPLES):
            row = opened.take(lane)
            if LaneCursor(*opened.cursor(lane)).epoch:
                break
            text += streaming.inputs(row)
            assert row.loss_mask is not None
            ends = row.tokens[1:] == 2
            assert not row.loss_mask[ends].any()
            if packing != "none":
                assert row.lengths is not None
                assert sum(row.lengths) == streaming.SEQ_LENGTH
        opened.close()
        found.update("\1" + part for part in text.split("\1") if part)
    assert found == expected


def test_targets_continue_over_samples_of_a_block(tmp_path: Path) -> None:
    """`order: window`: but for the first of each block, every token is a target once."""
    write(tmp_path, "parquet", [60])
    made = stream(tmp_path, "parquet", shuffle_buffer=12)
    opened = made.open_lanes({0: made.first_cursors()[0]})
    before, predicted, read, blocks_read = None, 0, 0, set()
    for _ in range(streaming.MOST_SAMPLES):
        row = opened.take(0)
        cursor = LaneCursor(*opened.cursor(0))
        if cursor.epoch:
            break
        blocks_read.add(cursor.number)
        if before is not None and cursor.taken > 1:
            assert before == row.tokens[0]
        before = row.tokens[-1] if not row.padding else None
        predicted += streaming.SEQ_LENGTH if row.loss_mask is None else int(row.loss_mask.sum())
        read += streaming.SEQ_LENGTH - row.padding
    assert blocks_read == set(range(5))  # of three rows
    assert read - 5 <= predicted <= read
    opened.close()


def test_origins_name_file_row_group_and_row(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [9, 30, 1, 20])
    made = stream(tmp_path, "parquet")
    opened = made.open_lanes({1: made.first_cursors()[1]})
    before = [0, 9, 39, 40]
    for _ in range(12):
        text = streaming.inputs(opened.take(1))
        pieces = ""
        for origin in opened.origins(1):
            path, _, group = origin.prefix.partition(", row group ")
            row = before[int(Path(path).stem)] + 7 * int(group) + origin.document
            pieces += (streaming.text_of(row) + "\0")[origin.offset : origin.offset + origin.tokens]
        assert pieces == text
    opened.close()


def test_a_stream_that_is_read_to_its_end_says_so(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [30])
    opened = stream(tmp_path, "jsonl", nb_epochs=2).open_lanes({0: [*LaneCursor()]})
    with pytest.raises(FatalTrainingError, match="data set 'web' is read to the end of its epoch 2"):
        take_for_ever(opened)
    opened.close()


def take_for_ever(opened: OpenLanes) -> None:
    for _ in range(streaming.MOST_SAMPLES):
        opened.take(0)


def test_a_lane_without_any_row_says_so(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [30])
    opened = stream(tmp_path, "parquet", filters="number < 0").open_lanes({0: [*LaneCursor()]})
    with pytest.raises(FatalTrainingError, match="got no sample in the whole epoch") as error:
        opened.take(0)
    assert "data.lanes" in str(error.value)
    opened.close()
    write(tmp_path / "none", "parquet", [0])
    opened = stream(tmp_path / "none", "parquet").open_lanes({0: [*LaneCursor()]})
    with pytest.raises(FatalTrainingError, match="have no row"):
        opened.take(0)


def test_a_file_that_has_changed_is_named_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [30])
    made = stream(tmp_path, "jsonl")
    with (tmp_path / "000.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    opened = made.open_lanes({0: [*LaneCursor()]})
    with pytest.raises(InputError, match=r"had .* when the run began") as error:
        opened.take(0)
    assert "000.jsonl" in str(error.value)
    opened.close()


def test_a_file_that_is_edited_while_it_is_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [30])
    path = tmp_path / "000.jsonl"
    made = stream(tmp_path, "jsonl")
    path.touch()  # the same content
    opened = made.open_lanes({0: [*LaneCursor()]})
    opened.take(0)
    opened.close()
    path.write_bytes(path.read_bytes().replace(b"xx", b"yy"))
    opened = made.open_lanes({0: [*LaneCursor()]})
    with pytest.raises(InputError, match=r"000\.jsonl: this file was changed: its content is another one"):
        opened.take(0)
    opened.close()


@pytest.mark.parametrize(
    ("limit", "rows"),
    [
        ({"nb_files": 2}, 30),
        ({"fraction_of_files": 0.5}, 30),
        ({"nb_fragments": 3}, 20),
        ({"nb_rows": 17}, 17),
        ({"nb_rows": 1000}, 60),
    ],
    ids=str,
)
def test_a_limit_takes_the_first_of_the_files(tmp_path: Path, limit: dict[str, Any], rows: int) -> None:
    write(tmp_path, "parquet", [20, 10, 20, 10])
    made = stream(tmp_path, "parquet", limit=limit, lanes=2)
    assert sorted(row for lane in range(2) for row in first_epoch(made, lane)) == list(range(rows))


def test_a_limit_of_rows_of_lines(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [20, 10, 20])
    made = stream(tmp_path, "jsonl", limit={"nb_rows": 26}, lanes=2)
    assert sorted(row for lane in range(2) for row in first_epoch(made, lane)) == list(range(26))


def test_partitions_are_chosen_by_their_paths(tmp_path: Path) -> None:
    write(tmp_path / "split=train" / "year=2023", "parquet", [10])
    write(tmp_path / "split=train" / "year=2024", "parquet", [10], first=10)
    write(tmp_path / "split=test" / "year=2024", "parquet", [10], first=20)
    made = stream(tmp_path, "parquet", partition_filters='pc.field("split") == "train" and year >= 2024', lanes=1)
    assert sorted(first_epoch(made, 0)) == list(range(10, 20))
    for condition, words in (("language == 'de'", "no path has a part language="), ("year > 3000", "leaves none")):
        with pytest.raises(ConfigError, match=words):
            stream(tmp_path, "parquet", partition_filters=condition)


def test_what_the_files_do_not_have_is_refused_before_a_run(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [10])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"column": "content"}, "no column 'content'; there are: text, number, even"),
        ({"filters": "score > 1"}, "stream.filters: no column 'score'"),
        ({"filters": "number == 'a'"}, """stream.filters "number == 'a'" does not fit the columns"""),
        ({"filters": f"number > {10**400}"}, "stream.filters 'number > 1000+ does not fit the columns"),
        ({"filters": f"number in [0.5, {10**400}]"}, "does not fit the columns"),
    ]
    for options, words in cases:
        with pytest.raises((InputError, ConfigError), match=words):
            stream(tmp_path, "parquet", **options)
    with pytest.raises(InputError, match="source: jsonl finds no such file here; there are files of parquet"):
        stream(tmp_path, "jsonl")
    with pytest.raises(InputError, match="no such"):
        stream(tmp_path / "nowhere", "parquet")


def test_turns_deal_every_sample_once_and_every_lane_its_share() -> None:
    """Each second sample of a data set would else come from the same half of the lanes for ever."""
    weights = integer_weights({"a": 1, "b": 1, "c": 0.37})
    for lanes in (1, 2, 12, 64):
        turned, plain = RotatedInterleave(Interleave(weights), lanes), Interleave(weights)
        counts = dict.fromkeys(weights, 0)
        used = {name: np.zeros(lanes, np.int64) for name in weights}
        for n in range(lanes * lanes + lanes // 2):
            assert turned.counts(n) == counts
            name, position = turned.locate(n)
            assert position == counts[name]
            counts[name] += 1
            used[name][n % lanes] += 1
            if (n + 1) % lanes == 0:
                assert counts == plain.counts(n + 1)
            assert max(abs(counts[name] - count) for name, count in plain.counts(n + 1).items()) <= 4
        for share in used.values():
            assert np.ptp(share) <= 6 * max(1, lanes**0.5)
    halves = RotatedInterleave(Interleave(integer_weights({"a": 1, "b": 1})), 64)
    lanes_of_a = Counter(n % 64 for n in range(64 * 64) if halves.locate(n)[0] == "a")
    assert set(lanes_of_a.values()) == {32}


def test_phases_keep_their_lanes() -> None:
    schedule = Schedule.from_weights({"a": 1, "b": 1}, 4).with_phase(10, integer_weights({"a": 1}), 4)
    assert schedule.to_json()[1]["lanes"] == 4
    assert Schedule.from_json(schedule.to_json()).to_json() == schedule.to_json()
    assert [schedule.number_in_phase(k) for k in (9, 10, 13)] == [9, 0, 3]
    assert "lanes" not in Schedule.from_weights({"a": 1}).to_json()[0]


@pytest.mark.slow
def test_samples_that_were_passed_over_are_read_and_left(tmp_path: Path) -> None:
    """A rollback goes back to a checkpoint at sample 40, and passes over what led to trouble before sample 60."""
    write(tmp_path, "parquet", [90])

    def made() -> MixtureSampler:
        return sampler({"web": stream(tmp_path, "parquet", shuffle_buffer=20)}, {"web": 1})

    first = made()
    reading = first.lane_reader(0, 0, 1)
    expected = {k: streaming.digest(reading.row(k)) for k in range(100)}
    assert json.loads(json.dumps(first.state(40)))["streams"]["web"]["at"] == 0  # as the attempt began
    reading.close()
    saving = made()
    reading = saving.lane_reader(0, 0, 1)
    for k in range(40):
        reading.row(k)
    checkpoint = json.dumps(saving.state(40, [reading.cursors(40)]))
    reading.close()
    for through in (lambda order: order, lambda order: resumed(made(), order.state(60))):
        order = through(resumed(made(), json.loads(checkpoint)))
        halves = [order.lane_reader(60, replica, 2) for replica in range(2)]
        again = resumed(made(), order.state(60, [half.cursors(60) for half in halves])).lane_reader(60, 0, 1)
        assert {k: streaming.digest(again.row(k)) for k in range(60, 100)} == {k: expected[k] for k in range(60, 100)}
        for half in halves:
            assert all(streaming.digest(half.row(k)) == expected[k] for k in half.numbers(60, 100))
        for each in (*halves, again):
            each.close()


def resumed(order: MixtureSampler, state: dict[str, Any]) -> MixtureSampler:
    order.resume(json.loads(json.dumps(state)))
    return order


def test_replicas_must_divide_the_lanes(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [30])
    made = sampler({"web": stream(tmp_path, "jsonl", lanes=4)}, {"web": 1})
    with pytest.raises(ConfigError, match="4 lanes of this run's streams cannot be divided among 3"):
        made.lane_reader(0, 0, 3)


def test_lanes_of_a_checkpoint_are_checked(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [30])
    made = sampler({"web": stream(tmp_path, "jsonl", lanes=4)}, {"web": 1})
    n = len(LaneCursor._fields)
    for cursors in (
        [[0] * n] * 3,
        [[0] * (n + 1)] * 4,
        [[0] * (n - 1)] * 4,
        [[0] * (n - 1) + [-1]] * 4,
        [["0"] * n] * 4,
    ):
        state = made.state(0)
        state["streams"]["web"]["cursors"] = cursors
        with pytest.raises(FatalTrainingError, match="lanes of data set 'web' in the checkpoint are damaged"):
            made.resume(state)


def test_a_reader_ahead_gives_items_and_then_the_error() -> None:
    def items() -> Any:
        yield from range(3)
        raise InputError("torn")

    for depth in (0, 1, 5):
        ahead = Prefetcher(items(), depth, name="test")
        assert [next(ahead) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(InputError, match="torn"):
            next(ahead)
        ahead.close()
    assert list(Prefetcher(iter(range(4)), 2, name="test")) == [0, 1, 2, 3]


def test_an_end_of_the_process_does_not_wait_for_a_thread_that_is_about_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead = Prefetcher(iter(range(4)), 2, name="test", starts=False)
    monkeypatch.setattr(threading.Thread, "start", lambda self: ahead.join(1.0))
    ahead.start()


def test_an_item_is_read_when_there_is_room_for_it() -> None:
    """One more, which waited to be put among the others, was a whole block of texts in memory."""
    begun: list[int] = []

    def items() -> Any:
        for number in range(6):
            begun.append(number)
            yield number

    ahead = Prefetcher(items(), 2, name="test")
    for number in range(3):
        assert next(ahead) == number
        time.sleep(0.2)
        assert len(begun) <= number + 3
    ahead.close()


READS_AT_ITS_END = """
import io, sys, time
import pyarrow as pa, pyarrow.parquet as pq
from relayrun.tokens.order.prefetcher import Prefetcher

class Slow(io.BytesIO):
    def read(self, size=-1):
        time.sleep(0.2)
        return super().read(size)

def items():
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": ["x"] * 100}), sink, row_group_size=1)
    with pq.ParquetFile(pa.PythonFile(Slow(sink.getvalue().to_pybytes()), "r")) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, use_threads=False)

ahead = Prefetcher(items(), 1, name="test")
print(len(next(ahead)))
if sys.argv[1] == "close":
    ahead.close()
"""


@pytest.mark.parametrize("closes", ["close", "leave"])
def test_a_program_may_end_while_its_thread_reads(closes: str) -> None:
    """As below a URL, where Arrow calls Python: the interpreter hung, or was killed by a fatal error."""
    command = [sys.executable, "-c", READS_AT_ITS_END, closes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_blocks_of_a_shuffle_do_not_cross_epochs(tmp_path: Path) -> None:
    """Elsewhere a window goes on over the end of an epoch: a row comes twice before another came once."""
    write(tmp_path, "parquet", [13, 12])  # no whole number of blocks
    made = stream(tmp_path, "parquet", lanes=2, shuffle_buffer=8)
    blocks_read = made.blocks.read(0, BlockStart(0, 0, 0, 0))
    for _ in range(3):
        rows = []
        while len(rows) < 25:
            block = next(blocks_read)
            rows += [numbers_in(text)[0] for text in block.rows[TEXT_COLUMN].to_pylist()]
        assert sorted(rows) == list(range(25))


def test_a_stream_that_leaves_a_mixture_and_comes_back_goes_on_where_it_was(tmp_path: Path) -> None:
    """In Grain a data set that is taken out of a mixture loses its place."""
    write(tmp_path / "web", "parquet", [90])
    write(tmp_path / "code", "jsonl", [90])

    def mixture(*names: str) -> MixtureSampler:
        kinds = {"web": "parquet", "code": "jsonl"}
        return sampler(
            {name: stream(tmp_path / name, kinds[name], name=name) for name in names}, dict.fromkeys(names, 1)
        )

    def trained(order: MixtureSampler, first: int, end: int) -> tuple[list[str], dict[str, Any]]:
        reading = order.lane_reader(first, 0, 1)
        found = [streaming.digest(reading.row(k)) for k in range(first, end) if order.locate(k)[0] == "web"]
        state = json.loads(json.dumps(order.state(end, [reading.cursors(end)])))
        reading.close()
        return found, state

    alone = trained(mixture("web"), 0, 40)[0]
    first, state = trained(mixture("web"), 0, 12)
    without = mixture("code")
    without.resume(state)
    _, state = trained(without, 12, 32)
    back = mixture("web")
    assert back.resume(state) == 32
    assert first + trained(back, 32, 44)[0] == alone[:24]
