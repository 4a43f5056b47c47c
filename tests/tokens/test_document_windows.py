"""Windows that never cross a document: by number, against a slow reference and against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from relayrun.errors import FatalTrainingError, InputError
from relayrun.tokens.order.document_windows import DOCUMENTS_PER_BLOCK, DocumentCut, DocumentWindows
from relayrun.tokens.shards.manifest import DatasetManifest
from relayrun.tokens.shards.shard import ShardWriter


def shards(folder: Path, sizes: Sequence[Sequence[int]], dtype: type[np.generic] = np.int32) -> DatasetManifest:
    """Shards of documents of these lengths; tokens count up from 10 over all of them."""
    first, prefixes = 10, []
    for number, lengths in enumerate(sizes):
        writer = ShardWriter(folder / f"s{number}", dtype)
        writer.add(np.arange(first, first + sum(lengths)), lengths)
        writer.finish()
        first += sum(lengths)
        prefixes.append(folder / f"s{number}")
    return DatasetManifest.build(prefixes)


def reference(sizes: Sequence[Sequence[int]], cut: DocumentCut) -> list[tuple[int, int, int, list[int]]]:
    """(shard, document, offset, tokens) of every window, one token after the other."""
    found, first = [], 10
    for shard, lengths in enumerate(sizes):
        for document, length in enumerate(size for size in lengths if size):
            n = length - (cut.drop_end is not None)
            at = 0
            while n > 0:
                text = list(range(first + at, first + min(n, at + cut.content)))
                around = [*([cut.bos] if cut.bos is not None else [])], [*([cut.eos] if cut.eos is not None else [])]
                found.append((shard, document, at, around[0] + text + around[1]))
                if at + cut.content >= n:
                    break
                at += cut.content - cut.overlap
            first += length
    return found


CUTS = [
    DocumentCut(window=10, overlap=2, bos=1, eos=2),
    DocumentCut(window=1),
    DocumentCut(window=7, overlap=6),
    DocumentCut(window=5, overlap=1, eos=2),
    DocumentCut(window=64, overlap=0, bos=1),
]


@pytest.mark.parametrize("cut", CUTS)
def test_every_window_is_that_of_a_slow_reference(tmp_path: Path, cut: DocumentCut) -> None:
    rng = np.random.default_rng(cut.window)
    sizes = [
        rng.integers(0, 40, 3 * DOCUMENTS_PER_BLOCK + 5).tolist(),
        [1],
        rng.integers(1, 90, DOCUMENTS_PER_BLOCK).tolist(),
        [900, 0, 3],
    ]
    windows = DocumentWindows(shards(tmp_path, sizes), cut)
    expected = reference(sizes, cut)
    assert len(windows) == len(expected)
    lengths = [len(tokens) for *_, tokens in expected]
    assert windows.sizes(0, len(windows)).tolist() == lengths
    for _ in range(20):
        first, end = sorted(rng.integers(0, len(windows) + 1, 2).tolist())
        assert windows.sizes(first, end).tolist() == lengths[first:end]
    assert np.concatenate(list(windows.all_sizes(7))).tolist() == lengths
    for i in {0, len(windows) - 1, *rng.integers(0, len(windows), 200).tolist()}:
        shard, document, offset, tokens = expected[i]
        number, place, _ = windows.locate(i)
        assert (number, place.document, place.offset) == (shard, document, offset)
        assert windows.read(i).tolist() == tokens
        assert place.tokens == len(tokens) - cut.specials


def test_the_letters_with_an_overlap_of_two(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "s", np.uint8)
    writer.add(np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8), [26])
    writer.finish()
    windows = DocumentWindows(
        DatasetManifest.build([tmp_path / "s"]), DocumentCut(window=10, overlap=2, bos=94, eos=36)
    )
    read = [bytes(windows.read(i).astype(np.uint8)).decode() for i in range(len(windows))]
    assert read == ["^abcdefgh$", "^ghijklmn$", "^mnopqrst$", "^stuvwxyz$"]


def test_the_number_of_windows_is_the_documented_one() -> None:
    for window, overlap in ((10, 2), (3, 0), (8, 7), (1, 0)):
        cut = DocumentCut(window=window, overlap=overlap)
        n = np.arange(1, 200)
        wanted = np.where(n <= window, 1, np.ceil((n - overlap) / (window - overlap)))
        assert cut.windows(n).tolist() == wanted.tolist()


def test_an_end_of_document_is_dropped_and_must_be_there(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "s", np.uint16)
    writer.add([5, 6, 7, 0, 0, 8, 9], [4, 1, 2])
    writer.finish()
    windows = DocumentWindows(DatasetManifest.build([tmp_path / "s"]), DocumentCut(window=3, eos=2, drop_end=0))
    assert [windows.read(i).tolist() for i in range(2)] == [[5, 6, 2], [7, 2]]
    assert len(windows) == 3, "a document of its end alone has no window"
    with pytest.raises(FatalTrainingError, match=r"document 2 ends with the token id 9, not with .* 0"):
        windows.read(2)


def test_transformers_cuts_the_same_windows(tmp_path: Path) -> None:
    """`return_overflowing_tokens` of transformers, whose `stride` is the overlap."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {str(number): number for number in range(400)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words | {"[UNK]": 400}, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="1 $A 2", special_tokens=[("1", 1), ("2", 2)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
    for window, overlap in ((10, 2), (30, 0), (12, 9)):
        lengths = [1, 7, 8, 9, 10, 11, 60, 61, 100]
        texts = [" ".join(str(10 + i) for i in range(length)) for length in lengths]
        expected = [
            ids
            for text in texts
            for ids in tokenizer(
                text, max_length=window, stride=overlap, truncation=True, return_overflowing_tokens=True
            )["input_ids"]
        ]
        writer = ShardWriter(tmp_path / f"s{window}", np.uint16)
        writer.add(np.concatenate([np.arange(10, 10 + length) for length in lengths]), lengths)
        writer.finish()
        manifest = DatasetManifest.build([tmp_path / f"s{window}"])
        windows = DocumentWindows(manifest, DocumentCut(window=window, overlap=overlap, bos=1, eos=2))
        assert [windows.read(i).tolist() for i in range(len(windows))] == expected


def test_the_table_is_a_sixteenth_of_a_byte_a_document(tmp_path: Path) -> None:
    """At 10^9 documents 62.5 MB, and a few bytes a shard."""
    windows = DocumentWindows(shards(tmp_path, [[3] * 100_000]), DocumentCut(window=4))
    assert len(windows) == 100_000
    size = sum(table.nbytes for table in windows._tables)
    assert size <= 8 * (100_000 / DOCUMENTS_PER_BLOCK + 2)
    assert size / 100_000 * 1e9 < 100e6


@pytest.mark.parametrize("i", [-1, 3, 10**12])
def test_a_window_that_is_not_there_is_an_index_error(tmp_path: Path, i: int) -> None:
    with pytest.raises(IndexError, match=r"outside of range\(3\)"):
        DocumentWindows(shards(tmp_path, [[3, 3, 3]]), DocumentCut(window=4)).locate(i)


def test_an_overlap_must_leave_a_step() -> None:
    with pytest.raises(ValueError, match="an overlap of 8 does not fit windows with 8 tokens of text"):
        DocumentCut(window=10, overlap=8, bos=1, eos=2)


def test_an_index_that_became_shorter_is_named(tmp_path: Path) -> None:
    windows = DocumentWindows(shards(tmp_path, [[3] * 10]), DocumentCut(window=4))
    with open(tmp_path / "s0.idx", "r+b") as file:
        file.truncate(40)
    with pytest.raises(InputError, match=r"s0\.idx: index has become shorter"):
        windows.locate(9)


def test_the_last_window_of_a_document_says_so(tmp_path: Path) -> None:
    windows = DocumentWindows(shards(tmp_path, [[5, 2]]), DocumentCut(window=4, overlap=1))
    found = [windows.locate(i) for i in range(3)]
    assert [(place.document, place.offset, place.tokens, ends) for _, place, ends in found] == [
        (0, 0, 4, False),
        (0, 3, 2, True),
        (1, 0, 2, True),
    ]
