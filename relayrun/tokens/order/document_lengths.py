"""`relayrun data lengths`: statistics of document lengths, their order in the files, and a picture of both.

`summarize_lengths` estimates windows and padding for each packing. `measure_length_order` distinguishes sorted files
from shuffled files. `draw_length_picture` draws a panel for each folder and a line for each file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from relayrun.config.sections.data import Packing
from relayrun.errors import ConfigError, InputError
from relayrun.progress import Progress, count
from relayrun.tokens.order.document_packing import WINDOWS_PER_BLOCK, count_rows
from relayrun.tokens.order.document_windows import DocumentCut
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.inputs import data_endings
from relayrun.tokens.readers.inventory import find_data_files
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.shards.prefixes import find_prefixes
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.stores import urls
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions

CURVE_POINTS = 50
"""Maximum points of a file's curve."""

LengthArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LengthCurve:
    """Mean document length against position in a file."""

    file: str
    documents: int
    positions: list[float]
    """Middles of equal stretches, as shares of the file's documents."""
    means: list[float]
    """Mean length of the documents of each stretch."""


@dataclass(frozen=True, kw_only=True)
class LengthOrder:
    """The order of lengths in the files of a folder."""

    batch: int
    """Documents of a batch."""
    lag_1_correlation: float | None
    """None if no file has two documents, or if all lengths are equal."""
    lag_1_noise: float | None
    """Two standard deviations of the correlation of independent draws."""
    batch_mean_variance_ratio: float | None
    """None for fewer than two whole batches."""
    curves: list[LengthCurve]


def measure_length_order(files: Sequence[tuple[str, LengthArray]], *, batch: int) -> LengthOrder:
    """Measure the order of lengths, given for each file with its name. Files without documents have no curve."""
    own = [lengths for _, lengths in files if len(lengths)]
    everything = np.concatenate([np.zeros(0, np.int64), *own]).astype(np.float64)
    mean = float(everything.mean()) if len(everything) else 0.0
    variance = float(everything.var()) if len(everything) else 0.0
    pairs = sum(len(lengths) - 1 for lengths in own)
    products = sum(float(((lengths[:-1] - mean) * (lengths[1:] - mean)).sum()) for lengths in own)
    whole = [lengths[: len(lengths) // batch * batch].reshape(-1, batch).mean(axis=1) for lengths in own]
    means = np.concatenate([np.zeros(0), *whole])
    return LengthOrder(
        batch=batch,
        lag_1_correlation=products / pairs / variance if pairs and variance else None,
        lag_1_noise=2 / float(np.sqrt(pairs)) if pairs and variance else None,
        batch_mean_variance_ratio=float(means.var() / (variance / batch)) if len(means) > 1 and variance else None,
        curves=[_length_curve(name, lengths) for name, lengths in files if len(lengths)],
    )


def _length_curve(name: str, lengths: LengthArray) -> LengthCurve:
    count = min(CURVE_POINTS, len(lengths))
    edges = np.linspace(0, len(lengths), count + 1).round().astype(np.int64)
    means = np.add.reduceat(lengths, edges[:-1]) / np.diff(edges)
    middles = (edges[:-1] + edges[1:]) / (2 * len(lengths))
    return LengthCurve(file=name, documents=len(lengths), positions=middles.tolist(), means=means.tolist())


COMPARED_PACKINGS: tuple[Packing, ...] = ("pad", "split", "greedy", "first_fit", "best_fit")
SAMPLED_BLOCKS = 512
"""Maximum blocks of windows that are packed for an estimate, spread evenly over the data."""
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
    """Share of documents that need more than one window."""
    in_long: float
    """Share of the total in these documents."""
    windows: int
    padding: dict[Packing, float]
    """Share of the rows that is padding, by packing."""
    packed_windows: int
    """Windows on which the shares of padding are based: all, or those of the sampled blocks."""


def lengths_by_file(
    folder: str | os.PathLike[str], *, column: str, tokenizer: str | None
) -> tuple[list[tuple[str, npt.NDArray[np.int64]]], str]:
    """Return the lengths of all documents of each file below a folder, in order, and the unit: `tokens` or `bytes`.
    Files are named by their paths below the folder; a shard is one file. Null texts are not documents. Raises
    InputError for a folder with neither shards nor text, and for unreadable files."""
    place = urls.absolute_path(folder)
    if not urls.is_url(place) and any(Path(place).rglob("*.idx")):
        prefixes = find_prefixes([Path(place)])
        return [
            (os.path.relpath(prefix, place), np.array(Shard.open(prefix).lengths(), np.int64)) for prefix in prefixes
        ], "tokens"
    files = find_data_files(place)
    if not files:
        raise InputError(f"no file below this folder ends in .idx, {data_endings()}", where=place)
    engine = load_tokenizer(TokenizeOptions(tokenizer=tokenizer, append_eod="no")).tokenizer if tokenizer else None
    found = []
    with Progress("measuring", sum(size for _, size in files)):
        for path, size in files:
            name = path.removeprefix(urls.join_path(place, ""))
            found.append((name, join_lengths(_text_lengths(path, column, engine))))
            count(size)
    return found, "tokens" if tokenizer else "bytes"


def _text_lengths(path: str, column: str, engine: Tokenizer | None) -> Iterator[npt.NDArray[np.int64]]:
    for array in read_column(path, column, batch_bytes=_BATCH_BYTES):
        texts = PackedTexts.from_arrow(array.drop_null())
        if engine is None:
            yield np.array(texts.sizes, np.int64)
        else:
            encoded = engine.encode_batch_fast(texts.strings(), add_special_tokens=False)
            yield np.array([len(each.ids) for each in encoded], np.int64)


def join_lengths(parts: Iterable[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def summarize_lengths(lengths: npt.NDArray[np.int64], cut: DocumentCut, room: int) -> LengthSummary:
    """Summarize lengths for documents cut by `cut` into rows of `room` tokens. Documents of length 0 give no window.
    Raises InputError if no document has a token."""
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
    """Return the shares of padding, and the number of windows that were packed."""
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
            rows[packing] += count_rows(sizes, room, packing)
    return {packing: 1 - text / (count * room) for packing, count in rows.items()}, windows


PICTURE_SUFFIXES = (".svg", ".png", ".pdf")
MAX_CURVES = 100
"""Maximum files of a folder in the picture, spread over all files."""


def check_picture_name(picture: Path) -> None:
    """Raise ConfigError for a file name without a suffix of `PICTURE_SUFFIXES`."""
    if picture.suffix not in PICTURE_SUFFIXES:
        hint = f"end it in {', '.join(PICTURE_SUFFIXES)}"
        raise ConfigError(f"{picture.name!r} names no kind of picture", where="--picture", hint=hint)


def draw_length_picture(orders: Mapping[str, LengthOrder], picture: Path, *, unit: str) -> None:
    """Write the panels of some folders, by title. `unit` is the unit of the lengths. All panels share their scales."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "relayrun", "svg.fonttype": "none"}):  # equal pictures have equal bytes
        figure = Figure(figsize=(1 + 4.5 * len(orders), 4), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(orders), sharex=True, sharey=True, squeeze=False)[0]
        for panel, (title, order) in zip(panels, orders.items(), strict=True):
            number = min(MAX_CURVES, len(order.curves))
            for index in np.linspace(0, max(0, len(order.curves) - 1), number).round().astype(int).tolist():
                curve = order.curves[index]
                panel.plot(curve.positions, curve.means, linewidth=0.8, alpha=max(0.15, 1 / number**0.5))
            lines = [title]
            if order.lag_1_correlation is not None:
                lines.append(f"lag-1 correlation {order.lag_1_correlation:.3f}")
            if (ratio := order.batch_mean_variance_ratio) is not None:
                lines.append(f"variance of batch means / of independent draws {ratio:.2f}")
            panel.set(title="\n".join(lines), xlabel="position in the file", xlim=(0, 1), yscale="log")
            panel.title.set_fontsize(9)
            panel.grid(visible=True, linewidth=0.3)
        panels[0].set_ylabel(f"mean length, {unit}")
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(picture.suffix)
        figure.savefig(picture, metadata=metadata)
