"""`order: document-window`: windows that never cross a document, packed into rows, and the rows shuffled.

    epoch, i = divmod(position, rows)
    row      = Permutation(rows, key(seed, name, epoch))(i)
    row      → pieces of windows → tokens, lengths, loss mask

A row has as many inputs as the sequence length. A window's last token has no target: what stands behind it is another
window, or padding, and its loss does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relayrun.config.sections.document_window import DocumentWindowSection
from relayrun.errors import ConfigError
from relayrun.tokens.order.block_cache import BlockCache
from relayrun.tokens.order.document_windows import DocumentCut, DocumentWindows
from relayrun.tokens.order.packing import PackedRows
from relayrun.tokens.order.permutation import Permutation, permutation_key
from relayrun.tokens.order.rows import SampleRow
from relayrun.tokens.order.windows import DocumentOrigin
from relayrun.tokens.shards.manifest import DatasetManifest


def document_cut(
    settings: DocumentWindowSection, *, seq_length: int, eod: int | None, vocabulary_size: int | None, where: str
) -> DocumentCut:
    """How documents are cut, with the ids of `eod`, the tokenizer's end of document.

    Raises ConfigError if that is needed and missing, or if bos or eos is not below `vocabulary_size`.
    """
    if eod is None and (settings.eos is True or settings.drop_eod):
        raise ConfigError(
            "document_window.eos: true and drop_eod need an end-of-document token, and this tokenizer has none",
            where=where,
            hint="give eos as the id of a token",
        )
    cut = DocumentCut(
        window=settings.window or seq_length,
        overlap=settings.overlap,
        bos=settings.bos,
        eos=eod if settings.eos is True else None if settings.eos is False else settings.eos,
        drop_end=eod if settings.drop_eod else None,
    )
    for what, token in (("bos", cut.bos), ("eos", cut.eos)):
        if token is not None and vocabulary_size is not None and token >= vocabulary_size:
            raise ConfigError(
                f"document_window.{what} {token} is beyond the vocabulary of {vocabulary_size}",
                where=where,
                hint="give the id of a token of data.tokenizer",
            )
    return cut


class DocumentWindowOrder:
    """A data set (see `relayrun.tokens.order.samples.Dataset`) whose samples are rows of windows."""

    def __init__(
        self,
        manifest: DatasetManifest,
        settings: DocumentWindowSection,
        *,
        seq_length: int,
        seed: int,
        name: str,
        eod: int | None = None,
        padding: int = 0,
        vocabulary_size: int | None = None,
        cache: Path | None = None,
        opening: str | None = None,
        blocks: BlockCache | None = None,
    ) -> None:
        """`padding`: id of the token that fills rows. `cache`, `opening`: see `PackedRows`; `blocks`: `WindowDataset`.

        Raises ConfigError as `cut_of`, and if there is no window.
        """
        where = f"data set {name!r}"
        self.cut = document_cut(settings, seq_length=seq_length, eod=eod, vocabulary_size=vocabulary_size, where=where)
        self.seq_length = seq_length
        windows = DocumentWindows(manifest, self.cut, blocks=blocks)
        self.rows = PackedRows(windows, seq_length, settings.packing, cache=cache, opening=opening)
        if not len(self.rows):
            raise ConfigError("there is no document, so no window", where=where, hint="give more data")
        self._lengths = settings.packs
        self._mask_end = settings.mask_special and self.cut.eos is not None
        self._padding = padding
        self._permutation = lru_cache(2)(partial(_row_permutation, len(self.rows), seed, name))

    def __len__(self) -> int:
        """Rows in one epoch."""
        return len(self.rows)

    def number(self, epoch: int, i: int) -> int:
        """Which row (`PackedRows`) is number i of an epoch."""
        if epoch < 0 or not 0 <= i < len(self):
            raise IndexError(f"epoch {epoch}, row {i}: outside of range({len(self)})")
        return self._permutation(epoch)(i)

    def read(self, epoch: int, i: int) -> npt.NDArray[np.int64]:
        """Token ids, int64 [seq_length + 1], of number i of an epoch."""
        return self.row(epoch, i).tokens

    def row(self, epoch: int, i: int) -> SampleRow:
        """Number i of an epoch. Errors as in `DocumentWindows.read`."""
        pieces = self.rows.pieces(self.number(epoch, i))
        return fill_row(
            ((self.rows.windows.read(window), start, stop) for window, start, stop in pieces),
            seq_length=self.seq_length,
            padding=self._padding,
            with_lengths=self._lengths,
            mask_end=self._mask_end,
        )

    def origins(self, epoch: int, i: int) -> list[DocumentOrigin]:
        """Where the text of a row comes from: a piece of a document for each window, specials left out."""
        found, before = [], int(self.cut.bos is not None)
        for window, start, stop in self.rows.pieces(self.number(epoch, i)):
            whole = self.rows.windows.origin(window)
            first, end = max(start - before, 0), min(stop - before, whole.tokens)
            if end > first:
                found.append(
                    DocumentOrigin(
                        prefix=whole.prefix,
                        document=whole.document,
                        offset=whole.offset + first,
                        tokens=end - first,
                    )
                )
        return found


def fill_row(
    pieces: Iterable[tuple[npt.NDArray[np.integer[Any]], int, int]],
    *,
    seq_length: int,
    padding: int,
    with_lengths: bool,
    mask_end: bool,
) -> SampleRow:
    """A row of pieces of windows.

    `pieces`: the tokens of each window, the first that the row takes, and the one behind the last. `padding`:
    id of the token that fills the row. `with_lengths`: a token sees its own piece alone. `mask_end`: the loss of a
    window's last token does not count.
    """
    tokens = np.full(seq_length + 1, padding, np.int64)
    mask = np.zeros(seq_length, np.float32)
    at, lengths = 0, []
    for text, start, stop in pieces:
        end = at + stop - start
        tokens[at:end] = text[start:stop]
        # the target of a piece's last token: in the window's next piece, which begins the next row, or nowhere
        targets = min(stop, len(text) - 1) - start
        if stop < len(text) and end <= seq_length:
            tokens[end] = text[stop]
        mask[at : at + targets] = 1
        if mask_end and stop >= len(text) - 1 and targets:
            mask[at + targets - 1] = 0
        lengths.append(stop - start)
        at = end
    windows = len(lengths)
    if at < seq_length:
        lengths.append(seq_length - at)
    return SampleRow(
        tokens=tokens,
        lengths=lengths if with_lengths else None,
        loss_mask=mask,
        padding=seq_length - at,
        windows=windows,
    )


def _row_permutation(rows: int, seed: int, name: str, epoch: int) -> Permutation:
    return Permutation(rows, permutation_key(seed, name, epoch))
