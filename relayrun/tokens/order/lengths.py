"""How long the documents of a folder are, and what windows and packings would make of them: `relayrun data lengths`.

A folder of shards is measured in tokens, from the indices alone. One of text (parquet, jsonl, arrow, csv) is measured
in bytes of UTF-8, or in the tokens of a tokenizer, which then has to encode all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from relayrun.config.sections.document_window import Packing
from relayrun.errors import InputError
from relayrun.tokens.order.document_windows import DocumentCut
from relayrun.tokens.order.packing import WINDOWS_PER_BLOCK, assign_rows
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.formats import DATA_SUFFIXES
from relayrun.tokens.readers.texts import Texts
from relayrun.tokens.shards.indexed import Shard
from relayrun.tokens.shards.prefixes import find_prefixes
from relayrun.tokens.stores import stores
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.split import find_data_files

COMPARED_PACKINGS: tuple[Packing, ...] = ("pad", "split", "greedy", "first_fit", "best_fit")
SAMPLED_BLOCKS = 512
"""Blocks of windows that are packed for an estimate, spread evenly over the data, where there are more."""
_BATCH_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class LengthSummary:
    """The documents of a folder. Lengths are in tokens, or in bytes."""

    documents: int
    total: int
    """Sum of all lengths."""
    shortest: int
    median: float
    mean: float
    p99: float
    longest: int
    over: float
    """Share of the documents that need more than one window."""
    in_long: float
    """Share of the total that lies in these."""
    windows: int
    padding: dict[Packing, float]
    """Share of the rows that would be no text, by packing."""
    packed_windows: int
    """Windows from which the shares of padding come: all, or those of blocks spread over the data."""


def lengths_by_file(
    folder: str | os.PathLike[str], *, column: str, tokenizer: str | None
) -> tuple[list[tuple[str, npt.NDArray[np.int64]]], str]:
    """Lengths of all documents of each file below a folder in their order, and the unit: `tokens` or `bytes`.

    Files are named by their paths below the folder; a shard is one. Texts that are missing (null) are no documents.
    Raises InputError for a folder with neither shards nor text, and for what cannot be read in it.
    """
    place = stores.absolute_path(folder)
    if not stores.is_url(place) and any(Path(place).rglob("*.idx")):
        prefixes = find_prefixes([Path(place)])
        return [
            (os.path.relpath(prefix, place), np.array(Shard.open(prefix).lengths(), np.int64)) for prefix in prefixes
        ], "tokens"
    files = find_data_files(place)
    if not files:
        raise InputError(f"no file below this folder ends in .idx, {', '.join(DATA_SUFFIXES)}", where=place)
    engine = load_tokenizer(TokenizeOptions(tokenizer=tokenizer, append_eod="no")).tokenizer if tokenizer else None
    found = [
        (file.path, join_lengths(_text_lengths(stores.join_path(place, file.path), column, engine))) for file in files
    ]
    return found, "tokens" if tokenizer else "bytes"


def _text_lengths(path: str, column: str, engine: Tokenizer | None) -> Iterator[npt.NDArray[np.int64]]:
    for array in read_column(path, column, batch_bytes=_BATCH_BYTES):
        texts = Texts.from_arrow(array.drop_null())
        if engine is None:
            yield np.array(texts.sizes, np.int64)
        else:
            encoded = engine.encode_batch_fast(texts.strings(), add_special_tokens=False)
            yield np.array([len(each.ids) for each in encoded], np.int64)


def join_lengths(parts: Iterable[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Lengths one behind the other."""
    return np.concatenate([np.zeros(0, np.int64), *parts])


def summarize_lengths(lengths: npt.NDArray[np.int64], cut: DocumentCut, room: int) -> LengthSummary:
    """What lengths look like, cut as `cut` says and packed into rows of `room`. Documents of length 0 give no window.

    Raises InputError if there is no document with a token.
    """
    if not lengths.any():
        raise InputError("there is no document with any text")
    counts = cut.windows(lengths)
    long = counts > 1
    padding, packed = _padding(lengths, counts, cut, room)
    return LengthSummary(
        documents=len(lengths),
        total=int(lengths.sum()),
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        mean=float(lengths.mean()),
        p99=float(np.percentile(lengths, 99)),
        longest=int(lengths.max()),
        over=float(long.mean()),
        in_long=float(lengths[long].sum() / lengths.sum()),
        windows=int(counts.sum()),
        padding=padding,
        packed_windows=packed,
    )


def _padding(
    lengths: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], cut: DocumentCut, room: int
) -> tuple[dict[Packing, float], int]:
    """Shares of padding, and the number of windows that were packed for them."""
    ends = np.cumsum(counts)
    blocks = -(-int(ends[-1]) // WINDOWS_PER_BLOCK)
    chosen = np.unique(np.linspace(0, blocks - 1, min(blocks, SAMPLED_BLOCKS)).round().astype(np.int64))
    rows, text, windows = dict.fromkeys(COMPARED_PACKINGS, 0), 0, 0
    for block in chosen.tolist():
        first, last = block * WINDOWS_PER_BLOCK, min((block + 1) * WINDOWS_PER_BLOCK, int(ends[-1]))
        low, high = np.searchsorted(ends, first, side="right"), np.searchsorted(ends, last, side="left") + 1
        before = int(ends[low] - counts[low])
        sizes = cut.sizes(lengths[low:high])[first - before : last - before]
        text, windows = text + int(sizes.sum()), windows + len(sizes)
        for packing in COMPARED_PACKINGS:
            if packing == "split":
                rows[packing] += -(-int(sizes.sum()) // room)
            else:
                rows[packing] += int(assign_rows(sizes, room, packing).max()) + 1
    return {packing: 1 - text / (count * room) for packing, count in rows.items()}, windows
