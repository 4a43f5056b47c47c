"""Tables of parquet files, and fairseq2's documented examples of them, option for option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from relayrun.errors import ConfigError, InputError
from relayrun.tokens import streams
from relayrun.tokens.streams.tables import Bucketing, bucket_batches, fill_buckets
from tests import streaming
from tests.streaming import write


def rows(tables: Any) -> list[int]:
    """The rows of all tables, in their order."""
    return [number for table in tables for number in table["number"].to_pylist()]


def sizes(lengths: list[int], **options: Any) -> list[int]:
    """Rows of the tables that fragments of so many rows become; each row is as long as its number modulo 3."""
    tables = [pa.table({"text": ["x" * (row % 3) for row in range(length)]}) for length in lengths]
    return [len(table) for table in fill_buckets(tables, Bucketing(**options))]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [30, 50, 20, 70, 10, 40, 5]),
        ({"target_table_size": 60}, [80, 90, 55]),
        ({"target_table_size": 60, "min_fragment_number": 3}, [100, 120, 5]),
        ({"target_table_size": 60, "max_fragment_number": 2}, [80, 90, 50, 5]),
        ({"min_fragment_number": 2}, [80, 90, 50, 5]),
        ({"target_total_length": 60}, [80, 90, 55]),
        ({"target_table_memory": 1}, [225]),
    ],
    ids=str,
)
def test_fragments_become_tables_of_the_wanted_size(options: dict[str, Any], expected: list[int]) -> None:
    """The first sizes were measured with fairseq2 0.8.1."""
    assert sizes([30, 50, 20, 70, 10, 40, 5], **options) == expected


def test_batches(tmp_path: Path) -> None:
    """The example of fairseq2's documentation, in small: each row once an epoch, in batches of at most 32 rows."""
    files = write(tmp_path, "parquet", [100, 40, 90], group=20)
    options: dict[str, Any] = {"target_table_size": 100, "min_fragment_number": 2, "max_fragment_number": 10}
    tables = [*streams.open(tmp_path.as_posix(), nb_epochs=2, batch_size=32, shuffle=True, seed=4, **options)]
    assert sorted(rows(tables)) == sorted([row for file in files for row in file] * 2)
    assert {len(table) for table in tables[:3]} == {32}
    again = streams.open(tmp_path.as_posix(), nb_epochs=2, batch_size=32, shuffle=True, seed=4, **options)
    assert rows(again) == rows(tables)
    other = streams.open(tmp_path.as_posix(), nb_epochs=2, batch_size=32, shuffle=True, seed=5, **options)
    assert rows(other) != rows(tables)
    plain = streams.open(tmp_path.as_posix(), nb_epochs=1, fragment_shuffle_window=0)
    assert rows(plain) == [row for file in files for row in file]
    by_file = streams.open(tmp_path.as_posix(), nb_epochs=1, split_to_row_groups=False, fragment_shuffle_window=0)
    assert [len(table) for table in by_file] == [100, 40, 90]


def test_every_reader_gets_its_fragments(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [100, 40, 90], group=10)
    parts = [[*streams.open(str(tmp_path), nb_epochs=1, rank=rank, world_size=4)] for rank in range(4)]
    assert sorted(row for part in parts for row in rows(part)) == list(range(230))
    assert {len(part) for part in parts} == {5, 6}


def test_columns_filters_and_traces(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [30], group=10, extra={4: None})
    tables = streams.open(
        str(tmp_path),
        columns={"content": "text"},
        extra_columns=["number"],
        filters='pc.field("even") == True',
        add_fragment_traces=True,
        nb_epochs=1,
        fragment_shuffle_window=0,
    )
    table = pa.concat_tables(tables)
    names = ["content", "number", "__index_in_fragment", "__filename", "__fragment_index"]
    assert table.column_names == names
    right = [row for row in range(0, 30, 2) if row != 4]
    assert table["number"].to_pylist() == right
    assert table["content"].to_pylist() == [*map(streaming.text_of, right)]
    places = zip(table["__fragment_index"].to_pylist(), table["__index_in_fragment"].to_pylist(), strict=True)
    assert [10 * group + row for group, row in places] == right
    assert set(table["__filename"].to_pylist()) == {str(tmp_path / "000.parquet")}
    with_null = streams.open(str(tmp_path), columns=["text"], drop_null=False, nb_epochs=1)
    assert sum(table["text"].null_count for table in with_null) == 1


def test_threads_and_a_cache_change_no_row(tmp_path: Path) -> None:
    write(tmp_path / "text", "parquet", [100, 40, 90], group=10)
    (tmp_path / "cache").mkdir()
    cache = str(tmp_path / "cache")
    plain = [*streams.open(str(tmp_path / "text"), nb_epochs=2)]
    for options in ({"num_parallel_fragments": 3}, {"cache_dir": cache}, {"nb_prefetch": 0}):
        assert [*streams.open(str(tmp_path / "text"), nb_epochs=2, **options)] == plain
    assert [*(tmp_path / "cache").iterdir()] == []


def test_batches_by_length() -> None:
    table = pa.table({"text": ["x" * length for length in (5, 1, 30, 4, 2, 9, 10)]})

    def lengths(**options: Any) -> list[list[int]]:
        found = bucket_batches([(0, table)], Bucketing(total_batch_length=10, **options))
        return [[len(text) for text in batch["text"].to_pylist()] for batch in found]

    assert lengths() == [[5, 1, 4], [2], [9], [10]]
    assert lengths(drop_long_seq=False) == [[5, 1], [30], [4, 2], [9], [10]]
    assert lengths(order_by_length=True) == [[1, 2, 4], [5], [9], [10]]
    ordered = bucket_batches([(0, table)], Bucketing(order_by_length=True, batch_size=3))
    assert [len(text) for batch in ordered for text in batch["text"].to_pylist()] == [1, 2, 4, 5, 9, 10, 30]


def test_what_a_table_becomes(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [10])
    table = next(streams.open(str(tmp_path), columns=["number"]))
    assert table.to_pydict() == {"number": table["number"].to_pylist()}
    assert table.to_pylist()[0] == {"number": table["number"][0].as_py()}
    assert np.array_equal(table["number"].to_numpy(), table.to_pydict()["number"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"target_table_size": 3, "target_total_length": 3}, "are two sizes of one table"),
        ({"batch_size": 3, "total_batch_length": 3}, "are two sizes of one batch"),
        ({"min_fragment_number": 3, "max_fragment_number": 2}, "max_fragment_number is below"),
        ({"filters": "import os"}, "is no condition"),
        ({"bach_size": 3}, "bach_size"),
        ({"rank": 2, "world_size": 2}, "there is no rank 2 of 2"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    write(tmp_path, "parquet", [10])
    with pytest.raises(ConfigError) as error:
        streams.open(str(tmp_path), **options)
    assert words in str(error.value)


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [10])
    with pytest.raises(InputError, match="no column 'content'; there are: text, number, even"):
        next(streams.open(str(tmp_path), columns=["content"]))
