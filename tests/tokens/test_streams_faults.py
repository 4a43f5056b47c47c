"""What of a stream cannot be read: it ends the run, or is left out in its place and counted; and filters of lines."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.config.sections import conditions
from relayrun.errors import ConfigError, InputError, RelayrunError
from relayrun.tokens.readers import arrow_files, columns
from relayrun.tokens.streams import text_stream
from relayrun.tokens.streams.fragments import Fragment
from relayrun.tokens.streams.lane_cursor import LaneCursor
from relayrun.tokens.streams.row_filters import ConditionMisfit, arrow_expression, row_fulfils
from relayrun.tokens.streams.text_stream import TextStream
from tests import streaming
from tests.streaming import numbers_in, stream, write

SURROGATE = b'{"text": "\\ud800"}'
BAD = {
    3: (b'{"text": "torn', "not JSON"),
    8: (b'{"text": "\xff"}', "not UTF-8"),
    9: (SURROGATE, "lone surrogate"),
    17: (b"[1, 2]", "no object"),
    21: (b'{"other": "x"}', "no column"),
    22: (b'{"text": 5}', "not text"),
    29: (b'{"text": null}', "no text"),
}
"""Lines in the place of rows, each with the reason for which it is left out."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_stream, "MIN_ROWS_PER_LANE", 3)


def with_bad_lines(folder: Path) -> list[int]:
    """Three files of 30 rows, the first with the lines of `BAD`; return the rows that are good."""
    rows = [row for file in write(folder, "jsonl", [30, 30, 30]) for row in file]
    path = folder / "000.jsonl"
    lines = path.read_bytes().splitlines()
    for number, (line, _) in BAD.items():
        lines[number] = line
    path.write_bytes(b"\n".join(lines) + b"\n")
    return [row for row in rows if row not in BAD]


def with_bad_texts(folder: Path) -> list[int]:
    """Three parquet files of 30 rows, two texts of which are not UTF-8; return the rows that are good."""
    rows = [row for file in write(folder, "parquet", [30, 30, 30]) for row in file]
    texts = [streaming.text_of(row).encode() for row in rows[:30]]
    texts[4] = texts[20] = b"\xff"
    offsets = pa.array([sum(map(len, texts[:number])) for number in range(31)], pa.int32()).buffers()[1]
    array = pa.StringArray.from_buffers(30, offsets, pa.py_buffer(b"".join(texts)))
    table = pa.table({"text": array, "number": rows[:30], "even": [row % 2 == 0 for row in rows[:30]]})
    pq.write_table(table, folder / "000.parquet", row_group_size=7)
    return [row for row in rows if row not in (4, 20)]


def torn(path: Path) -> None:
    """Cut the end off a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 20])


def test_a_bad_row_is_named_from_any_batch_and_any_start(tmp_path: Path) -> None:
    with_bad_texts(tmp_path)
    path = str(tmp_path / "000.parquet")
    with pytest.raises(InputError, match=r"row group 0, row 4 of it"):
        [*columns.read_column(path, "text", batch_bytes=1)]  # a batch has one row
    reader = stream(tmp_path, "parquet").reader
    with pytest.raises(InputError, match=r"row group 2, row 6 of it"):
        [*reader.read(Fragment(0, 2), 3)]
    with pytest.raises(InputError, match=r"row group 2, row 6 of it"):
        [*reader.read(Fragment(0, None), 16)]


def first_epoch(made: TextStream) -> tuple[list[int], list[LaneCursor]]:
    """The rows of all lanes in their first epoch, and where each lane stands behind it."""
    opened = made.open_lanes(dict(enumerate(made.first_cursors())))
    found, cursors = [], []
    for lane in range(made.lanes):
        text: Counter[int] = Counter()
        pieces: dict[int, str] = {}
        for _ in range(streaming.MOST_SAMPLES):
            row = opened.take(lane)
            cursor = LaneCursor(*opened.cursor(lane))
            if cursor.epoch:
                break
            pieces[cursor.number] = pieces.get(cursor.number, "") + streaming.inputs(row)
        for piece in pieces.values():
            text.update(numbers_in(piece))
        assert max(text.values()) == 1
        found += sorted(text)
        cursors.append(cursor)
    opened.close()
    return sorted(found), cursors


def counts(cursors: list[LaneCursor]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for cursor in cursors:
        found.update(cursor.counts())
    assert sum(found.values()) == sum(cursor.left_out for cursor in cursors)
    return {reason: count for reason, count in found.items() if count}


@pytest.mark.parametrize("shuffled", [True, False])
def test_bad_lines_are_left_out_in_their_place_and_counted_by_reason(tmp_path: Path, shuffled: bool) -> None:
    good = with_bad_lines(tmp_path)
    options: dict[str, Any] = {} if shuffled else {"shuffle_buffer": 0, "fragment_shuffle_window": 0}
    found, cursors = first_epoch(stream(tmp_path, "jsonl", on_error="skip-line", **options))
    assert found == good
    assert counts(cursors) == Counter(reason for _, reason in BAD.values())
    assert sum(cursor.rows for cursor in cursors) == 90
    assert sum(cursor.files for cursor in cursors) == 0


def test_bad_texts_of_parquet_are_left_out_in_their_place(tmp_path: Path) -> None:
    good = with_bad_texts(tmp_path)
    found, cursors = first_epoch(stream(tmp_path, "parquet", on_error="skip-line", filters="number != 5"))
    assert found == [row for row in good if row != 5]
    assert counts(cursors) == {"not UTF-8": 2, "stream.filters": 1}


@pytest.mark.parametrize(
    ("kind", "bad", "where"),
    [
        ("jsonl", with_bad_lines, r"000\.jsonl:4: this line is not JSON"),
        ("parquet", with_bad_texts, r"000\.parquet: row group 0, row 4 of it .*not UTF-8"),
    ],
)
def test_without_the_option_the_first_bad_row_is_named(
    tmp_path: Path, kind: str, bad: Callable[[Path], list[int]], where: str
) -> None:
    bad(tmp_path)
    with pytest.raises(InputError, match=where):
        first_epoch(stream(tmp_path, kind, fragment_shuffle_window=0))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("window", [0, 5, -1])
def test_a_file_with_a_bad_row_is_left_out_whole(tmp_path: Path, kind: str, window: int) -> None:
    (with_bad_lines if kind == "jsonl" else with_bad_texts)(tmp_path)
    made = stream(tmp_path, kind, on_error="skip-file", fragment_shuffle_window=window)
    found, cursors = first_epoch(made)
    assert found == list(range(30, 90))
    assert counts(cursors) == {}
    assert sum(cursor.files for cursor in cursors) == 1
    assert sum(cursor.rows for cursor in cursors) == 60


@pytest.mark.parametrize("on_error", ["skip-file", "skip-line"])
@pytest.mark.parametrize(
    ("kind", "name"), [("jsonl", "001.jsonl.gz"), ("parquet", "002.parquet"), ("parquet", "000.parquet")]
)
def test_a_torn_file_is_left_out_whole(tmp_path: Path, kind: str, name: str, on_error: str) -> None:
    """Also the rows before the fault, as in tokenization; and also where it is the last file of an epoch."""
    write(tmp_path, kind, [30, 30, 30])
    torn(tmp_path / name)
    made = stream(tmp_path, kind, on_error=on_error, fragment_shuffle_window=0)
    found, cursors = first_epoch(made)
    assert found == [row for row in range(90) if row // 30 != int(name[:3])]
    assert sum(cursor.files for cursor in cursors) == 1
    with pytest.raises(InputError, match="cannot be read, it may be torn"):
        first_epoch(stream(tmp_path, kind))


@pytest.mark.parametrize("on_error", ["skip-file", "skip-line"])
def test_a_lane_goes_on_from_every_cursor_through_what_is_left_out(tmp_path: Path, on_error: str) -> None:
    with_bad_lines(tmp_path)
    torn(tmp_path / "001.jsonl.gz")
    made = stream(tmp_path, "jsonl", on_error=on_error)
    opened = made.open_lanes({0: made.first_cursors()[0]})
    cursors, expected = [], []
    for _ in range(20):
        cursors.append(opened.cursor(0))
        expected.append((streaming.digest(opened.take(0)), opened.cursor(0)))
    opened.close()
    assert LaneCursor(*cursors[-1]).epoch > 1
    assert LaneCursor(*cursors[-1]).files
    for at, cursor in enumerate(cursors):
        again = stream(tmp_path, "jsonl", on_error=on_error).open_lanes({0: json.loads(json.dumps(cursor))})
        for sample, behind in expected[at : at + 4]:
            assert (streaming.digest(again.take(0)), again.cursor(0)) == (sample, behind)
        again.close()


def test_what_a_file_system_fails_to_do_is_no_fault_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank would leave out what the others read."""
    write(tmp_path, "parquet", [30, 30])
    made = stream(tmp_path, "parquet", on_error="skip-file")

    def fails(path: str) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(arrow_files, "_open_source", fails)
    with pytest.raises(InputError, match="Input/output error"):
        first_epoch(made)


def test_a_file_that_is_away_is_no_fault_of_its_content(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [30, 30])
    made = stream(tmp_path, "jsonl", on_error="skip-file")
    (tmp_path / "000.jsonl").unlink()
    with pytest.raises(InputError, match="this file is missing"):
        first_epoch(made)


def test_files_of_which_none_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [30])
    (tmp_path / "000.jsonl").write_text("[\n1\n]\n")
    for on_error in ("fail", "skip-file", "skip-line"):
        with pytest.raises(InputError, match="is one JSON array"):
            stream(tmp_path, "jsonl", on_error=on_error)


def test_a_limit_counts_bad_rows(tmp_path: Path) -> None:
    good = with_bad_lines(tmp_path)
    found, _ = first_epoch(stream(tmp_path, "jsonl", on_error="skip-line", limit={"nb_rows": 70}))
    assert found == [row for row in good if row < 70]


def rows_of_json(generator: random.Random, count: int) -> list[dict[str, Any]]:
    return [
        {
            "a": generator.choice([None, -1, 0, 1, 2, 3]),
            "b": generator.choice([None, 0.5, 1.0, 2.5]),
            "c": generator.choice([None, "", "x", "yes", "größer"]),
            "d": generator.choice([None, True, False]),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "condition",
    [
        "a > 1",
        "1 < a <= 2",
        "a >= b",
        "a == b or c == 'x'",
        "not (a > 0 and b < 2)",
        "c in ['x', 'yes', None]",
        "a not in [1, 2]",
        "c.is_null() | (pc.utf8_length(c) > 2)",
        "~c.is_valid() and d == True",
        "pc.field('d') != False or a < -0.5",
        "utf8_length(c) == 6 or not (b >= 1)",
    ],
)
def test_a_condition_chooses_lines_as_arrow_chooses_rows(condition: str) -> None:
    found = rows_of_json(random.Random(condition), 300)
    tree = conditions.parse_row_condition(condition)
    schema = pa.schema([("a", pa.int64()), ("b", pa.float64()), ("c", pa.string()), ("d", pa.bool_())])
    table = pa.Table.from_pylist([row | {"n": n} for n, row in enumerate(found)], schema.append(pa.field("n", "int64")))
    expected = set(table.filter(arrow_expression(tree, table.schema))["n"].to_pylist())
    assert {n for n, row in enumerate(found) if row_fulfils(tree, row)} == expected
    without = [{name: value for name, value in row.items() if value is not None} for row in found]
    assert {n for n, row in enumerate(without) if row_fulfils(tree, row)} == expected


def test_a_condition_that_does_not_fit_a_value_says_so() -> None:
    for row in ({"a": "3"}, {"a": True}, {"a": [1]}, {"a": {}}):
        with pytest.raises(ConditionMisfit, match="a number"):
            row_fulfils(conditions.parse_row_condition("a > 1"), row)
    with pytest.raises(ConditionMisfit, match="not text"):
        row_fulfils(conditions.parse_row_condition("utf8_length(a) > 1"), {"a": 5})


def scored(folder: Path, values: list[Any]) -> None:
    """A file of lines with these scores; `...` stands for a line without one."""
    folder.mkdir(exist_ok=True)
    rows = [
        {"text": streaming.text_of(number), **({} if value is ... else {"score": value})}
        for number, value in enumerate(values)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_lines_are_filtered_by_their_values(tmp_path: Path) -> None:
    values = [None, ..., 0.2, 0.7, 1, 0, 3.5, *[0.9] * 40, *[0.1] * 13]
    scored(tmp_path, values)
    found, cursors = first_epoch(stream(tmp_path, "jsonl", filters="score > 0.5"))
    assert found == [n for n, value in enumerate(values) if value not in (None, ...) and value > 0.5]
    assert counts(cursors) == {"stream.filters": len(values) - len(found)}


def test_a_value_that_a_filter_cannot_compare_is_a_bad_line(tmp_path: Path) -> None:
    scored(tmp_path, [0.9] * 1200 + ["high"] + [0.9] * 20)
    with pytest.raises(InputError, match=r"a\.jsonl:1201: stream\.filters does not fit: 'high' > 0.5 compares text"):
        first_epoch(stream(tmp_path, "jsonl", filters="score > 0.5"))
    found, cursors = first_epoch(stream(tmp_path, "jsonl", filters="score > 0.5", on_error="skip-line"))
    assert len(found) == 1220
    assert counts(cursors) == {"misfit": 1}


def test_a_filter_reads_long_strings_whole(tmp_path: Path) -> None:
    """Which the reader of lines takes out of the line first."""
    tmp_path.mkdir(exist_ok=True)
    rows = [{"text": streaming.text_of(n), "page": "ä" * (700_000 if n == 3 else 5)} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    found, _ = first_epoch(stream(tmp_path, "jsonl", filters="pc.utf8_length(page) < 699999"))
    assert found == [n for n in range(40) if n != 3]


def test_a_filter_that_does_not_fit_the_lines_is_refused_before_a_run(tmp_path: Path) -> None:
    scored(tmp_path, ["high"] * 40)
    with pytest.raises(InputError, match=r"a\.jsonl:1: stream\.filters does not fit"):
        stream(tmp_path, "jsonl", filters="score > 0.5")
    with pytest.raises(ConfigError, match="the first lines have no 'year'"):
        stream(tmp_path, "jsonl", filters="year > 2000")


def test_a_parquet_file_without_the_column_of_a_filter_is_named(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [30, 30])
    pq.write_table(pa.table({"text": ["a"] * 30, "other": [1] * 30}), tmp_path / "001.parquet")
    with pytest.raises(InputError, match=r"001\.parquet: no column 'number'; there are: text, other"):
        first_epoch(stream(tmp_path, "parquet", filters="number > 3"))
    found, _ = first_epoch(stream(tmp_path, "parquet", filters="number > 3", on_error="skip-file"))
    assert found == list(range(4, 30))


HIGH = {"filters": 'pc.field("score") > 0.5'}


def same(row: dict[str, Any]) -> str:
    text: str = row["text"]
    return text


@pytest.mark.parametrize(
    ("first", "options", "words"),
    [
        (5, HIGH, "Field score has incompatible types"),
        (5, {"extra_columns": ["score"], "map": f"{__name__}:same"}, "Field score has incompatible types"),
        (24, HIGH, "stream.filters does not fit the columns of some files"),
    ],
)
def test_columns_of_another_kind_are_one_clear_error(
    tmp_path: Path, first: int, options: dict[str, Any], words: str
) -> None:
    """Whether they come to rows that fit in one block, or in a block of their own; blocks have 12 rows here."""
    for number, (size, score) in enumerate([(first, 1.0), (40, "high")]):
        table = pa.table({"text": [streaming.text_of(row) for row in range(size)], "score": [score] * size})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    made = stream(tmp_path, "parquet", shuffle_buffer=0, fragment_shuffle_window=0, **options)
    opened = made.open_lanes(dict(enumerate(made.first_cursors())))
    with pytest.raises(RelayrunError, match=words):
        [opened.take(turn % made.lanes) for turn in range(1000)]
    opened.close()


def test_what_ended_a_stream_is_told_again_also_without_reading_ahead(tmp_path: Path) -> None:
    """Not that the stream has come to its end."""
    write(tmp_path, "jsonl", [20], extra={3: 5})
    for depth in (0, 1):
        made = stream(tmp_path, "jsonl", nb_prefetch=depth)
        opened = made.open_lanes(dict(enumerate(made.first_cursors())))
        for _ in range(2):
            with pytest.raises(InputError, match="holds int, not text"):
                opened.take(0)
        opened.close()
