"""The examples in the documentations of fairseq2 and Grain, option for option: the rows that raw files give.

Which rows each example must give is worked out from the files alone. What those loaders were measured to do wrong
(fairseq2 0.8.1) has a test beside.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from relayrun.errors import ConfigError
from relayrun.tokens import streams
from relayrun.tokens.order.sampler import MixtureSampler
from relayrun.tokens.streams import text_stream
from tests import streaming
from tests.streaming import numbers_in, sampler, stream, write

COLUMNS = {"text": "source_text", "label": "target_label"}
EXTRA = ["metadata", "timestamp"]
ROWS, GROUP, LANES = 90, 10, 8
EVERY = "{}/*/*.parquet"
"""A pattern, which takes the test set, too: of the folder it is refused."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files below `split=train` and `split=test`, with the columns of fairseq2's example; some texts are missing."""
    folder, number = tmp_path_factory.mktemp("examples"), 0
    for split, files in (("train", 5), ("test", 2)):
        (folder / f"split={split}").mkdir()
        for file in range(files):
            rows = [*range(number, number + ROWS - 7 * file)]
            number += len(rows)
            table = pa.table(
                {
                    "source_text": [None if row % 11 == 3 else "word " * (row % 37) for row in rows],
                    "target_label": rows,
                    "metadata": [{"of": row % 4} for row in rows],
                    "timestamp": [None if row % 13 == 5 else row * 1000 for row in rows],
                    "answer": [row % 4 for row in rows],
                }
            )
            pq.write_table(table, folder / f"split={split}" / f"{file}.parquet", row_group_size=GROUP)
    return folder


def raw(folder: Path, pattern: str = "*/*.parquet") -> list[dict[str, Any]]:
    """All rows of the files, in the order of their names."""
    return [row for file in sorted(folder.glob(pattern)) for row in pq.ParquetFile(file).read().to_pylist()]


def labels(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return [row["target_label"] for row in rows]


def found(tables: Iterator[pa.Table], column: str = "target_label") -> list[int]:
    return [number for table in tables for number in table[column].to_pylist()]


def groups(numbers: Sequence[int], of: Mapping[int, tuple[int, int]]) -> list[tuple[int, int]]:
    """The row groups that rows are of, in the order in which they begin."""
    return list(dict.fromkeys(of[number] for number in numbers))


def row_groups(folder: Path) -> dict[int, tuple[int, int]]:
    """File and row group of each row, by its label."""
    found = {}
    for number, file in enumerate(sorted(folder.glob("*/*.parquet"))):
        for at, label in enumerate(pq.read_table(file)["target_label"].to_pylist()):
            found[label] = (number, at // GROUP)
    return found


def test_the_simple_example_reads_each_row_once_an_epoch(data: Path) -> None:
    """`nb_epochs=2, split_to_row_groups=True, fragment_shuffle_window=100, seed=42`, of rank 0 of 1."""

    def opened(seed: int = 42) -> list[int]:
        options: dict[str, Any] = {"nb_epochs": 2, "split_to_row_groups": True, "fragment_shuffle_window": 100}
        return found(streams.open(EVERY.format(data), seed=seed, drop_null=False, rank=0, world_size=1, **options))

    rows, right = opened(), sorted(labels(raw(data)))
    first, second = rows[: len(right)], rows[len(right) :]
    assert sorted(first) == sorted(second) == right
    assert first != second
    assert opened() == rows, "the same seed, the same order"
    assert opened(43) != rows


@pytest.mark.parametrize("window", [0, -1, 1, 4, 100, 200])
def test_windows_of_fragments(data: Path, window: int) -> None:
    """0: none; -1: global; n: files are shuffled globally, then row groups within windows of n."""
    of = row_groups(data)
    options = {"fragment_shuffle_window": window, "seed": 42, "nb_epochs": 2, "drop_null": False}
    rows = found(streams.open(EVERY.format(data), **options))
    half = len(rows) // 2
    order = [groups(rows[:half], of), groups(rows[half:], of)]
    plain = sorted(order[0])
    assert sorted(order[1]) == plain
    assert [row for group in order[0] for row in sorted(label for label in of if of[label] == group)] == rows[:half]
    if window == 0:
        assert order == [plain, plain]
        return
    assert order[0] != order[1]
    assert order[0] != plain
    if window in (1, 4):  # a window ends before the files after it begin
        files = list(dict.fromkeys(file for file, _ in found_order(data, 1)))
        lined_up = sorted(plain, key=lambda group: (files.index(group[0]), group[1]))
        for first in range(0, len(lined_up), window):
            assert set(order[0][first : first + window]) == set(lined_up[first : first + window])


def found_order(data: Path, window: int) -> list[tuple[int, int]]:
    """The row groups of one epoch in their order."""
    options = {"fragment_shuffle_window": window, "seed": 42, "nb_epochs": 1, "drop_null": False}
    return groups(found(streams.open(EVERY.format(data), **options)), row_groups(data))


def test_columns_traces_and_nulls(data: Path) -> None:
    """`NamedColumns` with two extra columns, `drop_null`, `add_fragment_traces`, two ahead, four at a time."""
    tables = [
        *streams.open(
            EVERY.format(data),
            columns=COLUMNS,
            extra_columns=EXTRA,
            add_fragment_traces=True,
            drop_null=True,
            nb_prefetch=2,
            num_parallel_fragments=4,
            nb_epochs=1,
            seed=42,
        )
    ]
    right = [row for row in raw(data) if row["source_text"] is not None and row["timestamp"] is not None]
    rows = [row for table in tables for row in table.to_pylist()]
    assert sorted(row["label"] for row in rows) == sorted(labels(right))
    by_label = {row["target_label"]: row for row in right}
    for row in rows:
        of = by_label[row["label"]]
        assert {new: row[new] for new in ("text", *EXTRA)} == {
            "text": of["source_text"],
            **{name: of[name] for name in EXTRA},
        }
        file = pq.ParquetFile(row["__filename"])
        again = file.read_row_group(row["__fragment_index"]).slice(row["__index_in_fragment"], 1)
        assert again["target_label"].to_pylist() == [row["label"]]


def test_the_whole_pipeline_for_ever(data: Path) -> None:
    """`partition_filters`, `nb_epochs=None`, a window of 100, columns, and bucketing into batches of 32."""
    tables = streams.open(
        str(data),
        partition_filters='pc.field("split") == "train"',
        nb_epochs=None,
        fragment_shuffle_window=100,
        columns=COLUMNS,
        extra_columns=EXTRA,
        nb_prefetch=2,
        num_parallel_fragments=3,
        target_table_size=1000,
        min_fragment_number=2,
        max_fragment_number=10,
        shuffle=True,
        batch_size=32,
    )
    right = sorted(
        row["target_label"]
        for row in raw(data, "split=train/*.parquet")
        if row["source_text"] is not None and row["timestamp"] is not None
    )
    rows: list[int] = []
    while len(rows) < 3 * len(right):
        table = next(tables)
        assert len(table) <= 32
        rows += table["label"].to_pylist()
    for epoch in range(3):
        assert sorted(rows[epoch * len(right) : (epoch + 1) * len(right)]) == right


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
@pytest.mark.parametrize("window", [0, 100, -1])
def test_readers_share_the_fragments_evenly(data: Path, world_size: int, shift: bool, window: int) -> None:
    """fairseq2 gave four ranks 11, 11, 7 and 7 fragments of 36 with `files_circular_shift`."""
    of = row_groups(data)
    options: dict[str, Any] = {"fragment_shuffle_window": window, "files_circular_shift": shift, "drop_null": False}
    parts = [
        found(streams.open(EVERY.format(data), nb_epochs=1, seed=42, rank=rank, world_size=world_size, **options))
        for rank in range(world_size)
    ]
    assert sorted(number for part in parts for number in part) == sorted(of)
    shares = [groups(part, of) for part in parts]
    if not shift or window == -1:
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        files = [len({file for file, _ in share}) for share in shares]
        assert max(files) - min(files) <= 1
        assert sum(files) == 7, "each file has one reader"
    begins = [of[part[0]] for part in parts]
    assert len({*begins}) == world_size, "each begins elsewhere"


def test_a_shift_needs_a_file_for_each_reader(data: Path) -> None:
    with pytest.raises(
        ConfigError, match="files_circular_shift gives each of 8 readers files of its own, and 7 files are"
    ):
        streams.open(EVERY.format(data), files_circular_shift=True, rank=0, world_size=8)


@pytest.mark.parametrize("options", [{"shuffle": True}, {}, {"batch_size": 16, "order_by_length": True}], ids=str)
def test_tables_do_not_cross_epochs(data: Path, options: dict[str, Any]) -> None:
    """Elsewhere a window goes on over the end of an epoch: a row comes twice before another came once."""
    right = sorted(labels(raw(data)))
    tables = streams.open(EVERY.format(data), nb_epochs=3, target_table_size=400, drop_null=False, **options)
    rows = found(tables)
    for epoch in range(3):
        assert sorted(rows[epoch * len(right) : (epoch + 1) * len(right)]) == right


@pytest.mark.parametrize("combine", [True, False])
def test_the_example_for_little_memory(data: Path, tmp_path: Path, combine: bool) -> None:
    """`cache`, `columns`, `target_table_memory=250`, one to five fragments of a table, batches of 16."""
    tables = [
        *streams.open(
            EVERY.format(data),
            columns={"text": "source_text"},
            cache_dir=str(tmp_path),
            num_parallel_fragments=2,
            target_table_memory=250,
            min_fragment_number=1,
            max_fragment_number=5,
            batch_size=16,
            combine_chunks=combine,
            nb_epochs=1,
        )
    ]
    right = Counter(row["source_text"] for row in raw(data) if row["source_text"] is not None)
    assert Counter(text for table in tables for text in table["text"].to_pylist()) == right
    assert max(map(len, tables)) == 16
    assert (max(table.column("text").num_chunks for table in tables) == 1) is combine
    assert [*tmp_path.iterdir()] == []


def test_a_filter_by_length(data: Path, tmp_path: Path) -> None:
    """`filter_strings_by_length(table, "text", min_len=10, max_len=1000)`, in a table and in a stream."""

    def by_length(table: pa.Table) -> pa.Table:
        lengths = pc.utf8_length(table["text"])
        return table.filter(pc.and_(pc.greater_equal(lengths, 10), pc.less_equal(lengths, 100)))

    right = [row for row in raw(data) if row["source_text"] is not None and 10 <= len(row["source_text"]) <= 100]
    tables = streams.open(EVERY.format(data), columns={**COLUMNS}, nb_epochs=1)
    assert sorted(found(map(by_length, tables), "label")) == sorted(labels(right))
    rows = write(tmp_path, "parquet", [60], extra={5: "short", 6: "x" * 101})[0]
    made = stream(tmp_path, "parquet", min_len=10, max_len=100, lanes=1, shuffle_buffer=0)
    text = first_epoch(made, 1)
    assert sorted(text) == [row for row in rows if row not in (5, 6) and len(streaming.text_of(row)) >= 10]


def test_the_example_of_the_hub_in_a_folder(data: Path) -> None:
    """A list of files, no shuffle, all columns, rows with nulls, `filters`; below `hf://` in test_streams_hub.py."""
    paths = [str(path) for path in sorted(data.glob("*/*.parquet")) if path.parent.name == "split=test"]
    tables = [
        *streams.open(
            paths,
            nb_epochs=1,
            split_to_row_groups=True,
            fragment_shuffle_window=0,
            columns=None,
            add_fragment_traces=False,
            drop_null=False,
            nb_prefetch=1,
            num_parallel_fragments=4,
            filters='pc.field("answer") == 0',
        )
    ]
    rows = [row for table in tables for row in table.to_pylist()]
    assert rows == [row for row in raw(data, "split=test/*.parquet") if row["answer"] == 0]


def test_what_tables_become(data: Path) -> None:
    """pandas, a dict, rows, torch; (polars.from_arrow takes the table as it is)."""
    table = next(streams.open(EVERY.format(data), columns=COLUMNS, nb_epochs=1, fragment_shuffle_window=0))
    rows = [row for row in raw(data)[:GROUP] if row["source_text"] is not None]
    assert table.to_pandas()["label"].tolist() == table.to_pydict()["label"] == labels(rows)
    assert table.to_pylist() == [{"text": row["source_text"], "label": row["target_label"]} for row in rows]
    torch = pytest.importorskip("torch")
    assert torch.from_numpy(table["label"].to_numpy().copy()).tolist() == labels(rows)


# Grain


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_stream, "MIN_ROWS_PER_LANE", 3)


def first_epoch(made: Any, lanes: int) -> list[int]:
    """The rows of the first epoch, in the order of the samples."""
    opened = made.open_lanes(dict(enumerate(made.first_cursors())))
    text = ["" for _ in range(lanes)]
    for lane in range(lanes):
        for _ in range(streaming.MOST_SAMPLES):
            row = opened.take(lane)
            if opened.cursor(lane)[0]:
                break
            text[lane] += streaming.inputs(row)
    opened.close()
    return [row for lane in text for row in numbers_in(lane)]


def test_the_hierarchical_shuffle(tmp_path: Path, small_blocks: None) -> None:
    """Files are shuffled, some are read in turns, and rows are shuffled in a window of them; each row comes once."""
    files = write(tmp_path, "parquet", [20] * 32, group=5)
    of = {row: number for number, file in enumerate(files) for row in file}
    made = stream(tmp_path, "parquet", fragment_shuffle_window=1, shuffle_buffer=40, lanes=4)
    assert made.blocks.groups == 4, "four files are read at a time"
    reading = sampler({"web": made}, {"web": 1}).lane_reader(0, 0, 1)
    read = [numbers_in(whole(streaming.inputs(reading.row(k)))) for k in range(4 * 12)]
    reading.close()
    lanes = [{of[row] for sample in read[lane::4] for row in sample} for lane in range(4)]
    assert all(not one & other for at, one in enumerate(lanes) for other in lanes[:at]), "each lane in files of its own"
    begun = [[of[sample[0]] for sample in read[lane::4] if sample] for lane in range(4)]
    assert [files[0] for files in begun] != [0, 1, 2, 3], "files are shuffled"
    within = [row for sample in read[::4] for row in sample]
    assert within != sorted(within, key=lambda row: (begun[0].index(of[row]), row)), "rows are shuffled in their window"
    assert sorted(first_epoch(made, 4)) == [row for file in files for row in file]


def whole(text: str) -> str:
    """The documents of a sample that neither began before it nor end behind it."""
    return text[text.index("\0") + 1 : text.rindex("\0")] if text.count("\0") > 1 else ""


def mixture(folder: Path, weights: Mapping[str, float]) -> MixtureSampler:
    return sampler({name: stream(folder / name, "parquet", name=name, lanes=LANES) for name in weights}, weights)


def trained(order: MixtureSampler, first: int, end: int, replicas: int) -> tuple[dict[int, tuple[str, int, str]], Any]:
    """Data set, lane and sample of each number, and the state at the end."""
    readings = [order.lane_reader(first, replica, replicas) for replica in range(replicas)]
    samples = {
        k: (order.locate(k)[0], order.schedule.number_in_phase(k) % LANES, streaming.digest(reading.row(k)))
        for reading in readings
        for k in reading.numbers(first, end)
    }
    state = json.loads(json.dumps(order.state(end, [reading.cursors(end) for reading in readings])))
    for reading in readings:
        reading.close()
    return samples, state


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for number, name in enumerate(("ds1", "ds2", "ds3")):
        write(tmp_path / name, "parquet", [40, 30], first=1000 * number)
    return tmp_path


def of_lanes(folder: Path, name: str, counts: Mapping[int, int]) -> dict[int, list[str]]:
    """The first samples of lanes of a data set."""
    made = stream(folder / name, "parquet", name=name, lanes=LANES)
    opened = made.open_lanes({lane: made.first_cursors()[lane] for lane in counts})
    samples = {lane: [streaming.digest(opened.take(lane)) for _ in range(count)] for lane, count in counts.items()}
    opened.close()
    return samples


def test_a_mixture_that_is_updated_on_resume(three: Path, small_blocks: None) -> None:
    """0.4 and 0.6, then 0.5, 0.3 and a new one with 0.2, then one less: the weights hold, and no sample is skipped.

    Grain discards what its buffers hold when a mixture changes, and forgets where a data set stood that is taken out.
    """
    samples: dict[int, tuple[str, int, str]] = {}
    state, at = None, 0
    for weights, end, replicas in (
        ({"ds1": 0.4, "ds2": 0.6}, 50, 2),
        ({"ds1": 0.5, "ds2": 0.3, "ds3": 0.2}, 110, 4),
        ({"ds2": 0.5, "ds3": 0.5}, 150, 1),
        ({"ds1": 0.4, "ds2": 0.6}, 200, 8),
    ):
        order = mixture(three, weights)
        if state is not None:
            assert order.resume(state) == at
        part, state = trained(order, at, end, replicas)
        assert sorted(part) == [*range(at, end)]
        counts = Counter(name for name, _, _ in part.values())
        for name, weight in weights.items():
            assert abs(counts[name] - weight * (end - at)) <= 1.5
        samples.update(part)
        at = end
    for name in ("ds1", "ds2", "ds3"):
        read: dict[int, list[str]] = {lane: [] for lane in range(LANES)}
        for k in range(at):
            if samples[k][0] == name:
                read[samples[k][1]].append(samples[k][2])
        assert min(map(len, read.values())) > 1
        assert read == of_lanes(three, name, {lane: len(found) for lane, found in read.items()})


def test_another_number_of_hosts_and_another_batch_size(three: Path, small_blocks: None) -> None:
    """Up from 2 to 8 and down to 1: the same samples with the same numbers, whatever the batches of a replica.

    Grain's states are counts of batches of each host, so that its batch size must stay; fairseq2's state is taken by
    any number of ranks, which then read other rows. Here a number that cannot be is refused.
    """
    weights = {"ds1": 0.4, "ds2": 0.6}
    expected = trained(mixture(three, weights), 0, 144, 1)[0]
    state, at, samples = None, 0, {}
    for end, replicas in ((16, 2), (64, 8), (100, 4), (144, 1)):
        order = mixture(three, weights)
        if state is not None:
            order.resume(state)
        part, state = trained(order, at, end, replicas)
        samples.update(part)
        at = end
    assert samples == expected
    order = mixture(three, weights)
    order.resume(state)
    with pytest.raises(ConfigError, match="8 lanes of this run's streams cannot be divided among 3"):
        order.lane_reader(at, 0, 3)
