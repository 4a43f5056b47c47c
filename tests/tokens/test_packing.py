"""Windows packed into rows: against slow references, in rows by number, and how full the rows are."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.config.sections.data import DataSection, DataSource, DocumentWindowSection
from relayrun.config.sections.training import GlobalBatchSizes
from relayrun.errors import ConfigError
from relayrun.tokens.order import document_packing, sample_rows
from relayrun.tokens.order.batches import BatchReader
from relayrun.tokens.order.datasets import WindowOrder
from relayrun.tokens.order.document_packing import DocumentWindowOrder, PackedRows, assign_rows
from relayrun.tokens.order.document_windows import DocumentCut, DocumentWindows
from relayrun.tokens.order.sample_rows import RowBatch, SampleRow
from relayrun.tokens.order.sampler import MixturePart, MixtureSampler
from relayrun.tokens.shards.manifest import DatasetManifest
from relayrun.tokens.shards.shard import ShardWriter

Sample = tuple[Any, Any, Any]
"""Tokens, lengths and loss mask of a row."""
PACKINGS = ("none", "pad", "split", "greedy", "first_fit", "best_fit")


def shard(prefix: Path, lengths: list[int], *, tokens: bool = True) -> DatasetManifest:
    """Documents of these lengths; every token tells its document: 1000 x its number, and counts up."""
    writer = ShardWriter(prefix, np.int32)
    ids = np.zeros(sum(lengths), np.int32)
    if tokens:
        ids = np.concatenate([1000 * (number + 1) + np.arange(length) for number, length in enumerate(lengths)])
    writer.add(ids, lengths)
    writer.finish()
    return DatasetManifest.build([prefix])


def seed_lengths(count: int) -> np.ndarray:
    """Lengths with the seed's median of 2.2k tokens, mean of 4k, and a tail over 1M."""
    lengths = np.exp(np.random.default_rng(7).normal(np.log(2200), 1.09, count)).astype(np.int64) + 1
    lengths[count // 2] = 1_200_000
    return lengths


def slow(sizes: list[int], room: int, how: str) -> list[int]:
    rows: list[int] = []
    found = [0] * len(sizes)
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i]) if how == "best_fit" else range(len(sizes))
    for window in order:
        fitting = [row for row, left in enumerate(rows) if left >= sizes[window]]
        if how == "greedy":
            fitting = [row for row in fitting if row == len(rows) - 1]
        if how == "best_fit":
            fitting.sort(key=lambda row: (rows[row], row))
        if not fitting:
            fitting = [len(rows)]
            rows.append(room)
        found[window] = fitting[0]
        rows[fitting[0]] -= sizes[window]
    return found


@pytest.mark.parametrize("how", ["greedy", "first_fit", "best_fit"])
def test_a_packing_is_that_of_a_slow_reference(how: document_packing.Packing) -> None:
    rng = np.random.default_rng(3)
    for count, room in ((1, 5), (40, 5), (200, 64), (300, 20), (150, 1)):
        sizes = rng.integers(1, room + 1, count)
        assert assign_rows(sizes, room, how).tolist() == slow(sizes.tolist(), room, how)


@pytest.mark.parametrize("how", PACKINGS)
def test_every_token_of_every_window_stands_once_in_the_rows(
    tmp_path: Path, how: document_packing.Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_packing, "WINDOWS_PER_BLOCK", 16)
    lengths = np.random.default_rng(5).integers(1, 40, 90).tolist()
    windows = DocumentWindows(shard(tmp_path / "s", lengths), DocumentCut(window=13, overlap=3, bos=1, eos=2))
    rows = PackedRows(windows, 16, how)
    pieces = [piece for i in range(len(rows)) for piece in rows.pieces(i)]
    assert all(sum(stop - start for _, start, stop in rows.pieces(i)) <= 16 for i in range(len(rows)))
    seen = sorted((window, token) for window, start, stop in pieces for token in range(start, stop))
    sizes = windows.sizes(0, len(windows)).tolist()
    assert seen == [(window, token) for window, size in enumerate(sizes) for token in range(size)]
    if how != "split":
        assert all(start == 0 for _, start, _ in pieces)
    again = PackedRows(windows, 16, how)
    for i in np.random.default_rng(1).integers(0, len(rows), 30).tolist():
        assert again.pieces(i) == rows.pieces(i), "a row is found by its number alone"


@pytest.mark.parametrize("how", PACKINGS)
@pytest.mark.parametrize("mask_special", [False, True])
def test_what_is_predicted_is_the_next_token_of_the_same_window(
    tmp_path: Path, how: document_packing.Packing, mask_special: bool
) -> None:
    lengths = np.random.default_rng(6).integers(1, 50, 40).tolist()
    settings = DocumentWindowSection(window=13, overlap=3, bos=1, eos=2, packing=how, mask_special=mask_special)
    order = DocumentWindowOrder(shard(tmp_path / "s", lengths), settings, seq_length=16, seed=1, name="a", padding=7)
    predicted = []
    for i in range(len(order)):
        row = order.row(0, i)
        assert row.tokens.tolist() == order.read(0, i).tolist()
        assert row.loss_mask is not None
        assert row.lengths is None if how == "none" else sum(row.lengths or ()) == 16
        assert (row.tokens[:-1][16 - row.padding :] == 7).all()
        assert not row.loss_mask[16 - row.padding :].any()
        counted = np.flatnonzero(row.loss_mask)
        predicted += zip(row.tokens[counted].tolist(), row.tokens[counted + 1].tolist(), strict=True)
    expected = []
    for window in range(len(order.rows.windows)):
        text = order.rows.windows.read(window).tolist()
        expected += [pair for pair in pairwise(text) if not (mask_special and pair[1] == 2)]
    assert sorted(predicted) == sorted(expected)


def test_an_epoch_has_every_row_once_in_another_order_and_says_where_it_is_from(tmp_path: Path) -> None:
    manifest = shard(tmp_path / "s", [30, 5, 9, 44, 3, 16, 2] * 6)
    order = DocumentWindowOrder(
        manifest, DocumentWindowSection(window=12, overlap=2, bos=1), seq_length=16, seed=1, name="a"
    )
    epochs = [[order.number(epoch, i) for i in range(len(order))] for epoch in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(len(order)))
    for i in range(len(order)):
        text = [
            1000 * (origin.document + 1) + origin.offset + token
            for origin in order.origins(1, i)
            for token in range(origin.tokens)
        ]
        row = order.row(1, i)
        assert [token for token in row.tokens[: 16 - row.padding].tolist() if token != 1] == text
    with pytest.raises(IndexError):
        order.read(0, len(order))


def test_best_fit_leaves_less_than_3_percent_and_twice_the_text_of_padded_rows(tmp_path: Path) -> None:
    """With the seed's lengths, and its windows of 8,192 with 200 shared."""
    lengths = seed_lengths(6000)
    assert 2000 < np.median(lengths) < 2400
    assert 3600 < lengths.mean() < 4400
    assert lengths.max() > 1e6
    cut = DocumentCut(window=8192, overlap=200, bos=1, eos=2)
    sizes = cut.sizes(lengths)
    blocks = [
        sizes[at : at + document_packing.WINDOWS_PER_BLOCK]
        for at in range(0, len(sizes), document_packing.WINDOWS_PER_BLOCK)
    ]
    rows = {how: sum(int(assign_rows(block, 8192, how).max()) + 1 for block in blocks) for how in ("pad", "best_fit")}
    useful = {how: sizes.sum() / count / 8192 for how, count in rows.items()}
    assert useful["best_fit"] > 0.97
    assert useful["best_fit"] > 2 * useful["pad"]


def test_rows_with_and_without_lengths_make_one_micro_batch() -> None:
    plain = SampleRow(tokens=np.arange(7))
    packed = SampleRow(
        tokens=np.arange(7), lengths=[2, 3, 1], loss_mask=np.array([1, 0, 1, 1, 0, 0], np.float32), padding=1, windows=2
    )
    assert RowBatch.stack([plain, plain]).lengths is None
    assert RowBatch.stack([plain, plain]).loss_mask is None
    rows = RowBatch.stack([plain, packed])
    assert rows.lengths == [None, [2, 3, 1]]
    assert rows.loss_mask is not None
    assert rows.loss_mask.tolist() == [[1] * 6, [1, 0, 1, 1, 0, 0]]
    assert (rows.padding, rows.windows) == (1, 3)
    inputs = rows.tokens[:, :-1]
    assert sample_rows.document_lengths(inputs, 3, rows.lengths) == [[4, 2], [2, 3, 1]]
    assert sample_rows.document_positions(inputs, -1, rows.lengths).tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 0]]


def test_settings_that_cannot_work_are_refused() -> None:
    source = {"path": "x", "weight": 1.0}

    def data(**values: object) -> DataSection:
        mixture = {"a": DataSource.model_validate(source | values.pop("source", {}))}  # type: ignore[operator]
        return DataSection.model_validate({"tokenizer": "t", "order": "document-window", "mixture": mixture} | values)

    assert data(document_window={"overlap": 3}).cut_by_document["a"].overlap == 3
    own = data(document_window={"overlap": 3}, source={"document_window": DocumentWindowSection(overlap=4)})
    assert own.order_of("a")[1]["overlap"] == 4
    assert own.masks_loss
    assert own.attends_documents
    assert not data(document_window={"packing": "none"}).attends_documents
    assert data(document_window={"drop_eod": True}).depends_on_ends
    assert not own.depends_on_ends
    for wrong, words in (
        ({"split": 0.1}, "hold data out by path"),
        ({"order": "window", "document_window": {}}, "no data set has order: document-window"),
        (
            {"order": "window", "source": {"document_window": DocumentWindowSection()}},
            "belongs to order: document-window",
        ),
        ({"source": {"options": {"window": 3}}}, "takes document_window, and no options"),
        ({"document_window": {"window": 10, "overlap": 8, "bos": 1, "eos": True}}, "overlap 8 must be below the 8"),
    ):
        with pytest.raises(ValueError, match=words):
            data(**wrong)


def test_an_end_of_document_that_the_tokenizer_lacks_is_asked_for(tmp_path: Path) -> None:
    manifest = shard(tmp_path / "s", [3])
    with pytest.raises(ConfigError, match=r"eos: true and drop_eod need an end-of-document token"):
        DocumentWindowOrder(manifest, DocumentWindowSection(eos=True), seq_length=8, seed=1, name="a")
    with pytest.raises(ConfigError, match=r"document_window.bos 7 is beyond the vocabulary of 6"):
        DocumentWindowOrder(manifest, DocumentWindowSection(bos=7), seq_length=8, seed=1, name="a", vocabulary_size=6)
    order = DocumentWindowOrder(manifest, DocumentWindowSection(eos=True), seq_length=8, seed=1, name="a", eod=5)
    assert order.read(0, 0).tolist() == [1000, 1001, 1002, 5, 0, 0, 0, 0, 0]


def test_the_rows_of_a_mixture_are_the_same_for_every_layout_and_after_every_resume(tmp_path: Path) -> None:
    """Beside a data set that gives tokens alone; the state between attempts is JSON."""
    lengths = np.random.default_rng(8).integers(1, 60, 80).tolist()
    packed, plain = shard(tmp_path / "a", lengths), shard(tmp_path / "b", [900])

    def mixture() -> MixtureSampler:
        cut = DocumentWindowSection(window=20, overlap=4, bos=1, eos=2)
        parts = {
            "a": DocumentWindowOrder(packed, cut, seq_length=24, seed=1, name="a"),
            "b": WindowOrder(plain, seq_length=24, seed=1, name="b"),
        }
        weights = {"a": 0.7, "b": 0.3}
        return MixtureSampler({n: MixturePart(dataset=d, weight=weights[n], record={}) for n, d in parts.items()}, {})

    def read(order: MixtureSampler, ranks: int, micro: int, consumed: int, iterations: int) -> list[Sample]:
        readers = [
            BatchReader(
                order,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                micro_batch_size=micro,
                batch_sizes=GlobalBatchSizes(8),
                consumed_samples=consumed,
            )
            for rank in range(ranks)
        ]
        found: list[Sample] = []
        for _ in range(iterations):
            shares = [next(reader) for reader in readers]
            for rows in (share[step] for step in range(8 // ranks // micro) for share in shares):
                for m in range(micro):
                    own = None if rows.lengths is None or rows.lengths[m] is None else [*(rows.lengths[m] or ())]
                    mask = [1.0] * 24 if rows.loss_mask is None else rows.loss_mask[m].tolist()
                    found.append((rows.tokens[m].tolist(), own, mask))
        for reader in readers:
            reader.close()
        return found

    whole = read(mixture(), 1, 8, 0, 30)
    assert any(own is None for _, own, _ in whole)
    assert any(own is not None for _, own, _ in whole)
    order, consumed, pieces = mixture(), 0, list[Sample]()
    for ranks, micro, iterations in ((4, 2, 7), (1, 1, 9), (8, 1, 3), (2, 4, 11)):
        pieces += read(order, ranks, micro, consumed, iterations)
        state = json.loads(json.dumps(order.state(consumed + 8 * iterations)))
        order = mixture()
        consumed = order.resume(state)
    assert len(pieces) == len(whole)
    assert [at for at, pair in enumerate(zip(pieces, whole, strict=True)) if pair[0] != pair[1]] == []


def test_rows_are_counted_once_and_counted_anew_where_what_is_kept_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(document_packing, "WINDOWS_PER_BLOCK", 16)
    manifest = shard(tmp_path / "s", np.random.default_rng(5).integers(1, 40, 90).tolist())
    windows, kept = DocumentWindows(manifest, DocumentCut(window=13, overlap=3, bos=1, eos=2)), tmp_path / "kept"
    counted: list[int] = []
    count = document_packing.count_rows

    def counting(sizes: Any, *options: Any) -> int:
        counted.append(len(sizes))
        return count(sizes, *options)

    monkeypatch.setattr(document_packing, "count_rows", counting)

    def opened(
        how: document_packing.Packing = "best_fit", room: int = 16, cut: DocumentCut = windows.cut
    ) -> tuple[int, list[Any]]:
        counted.clear()
        rows = PackedRows(DocumentWindows(manifest, cut), room, how, cache=kept, opening="an attempt")
        return len(counted), [rows.pieces(i) for i in range(len(rows))]

    blocks, expected = opened()
    assert blocks == -(-len(windows) // 16)
    assert opened() == (0, expected)
    for other in (opened("greedy"), opened(room=20), opened(cut=DocumentCut(window=13, overlap=2, bos=1, eos=2))):
        assert other[0] > 0, "other settings are other rows"
        assert other[1] != expected
    assert opened() == (0, expected)
    for path in kept.glob("*-rows.npy"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert opened() == (blocks, expected)
    assert "is not what was built" in caplog.text
    assert opened() == (0, expected)
    for path in kept.iterdir():
        path.unlink()
    kept.rmdir()
    kept.write_text("no folder")
    assert opened() == (blocks, expected)
    assert "counted at every start, and not kept" in caplog.text
