"""A sample with its documents: token ids, lengths of documents, loss mask; and rows of a micro-batch.

A data set whose samples are more than tokens has a method `row(epoch, i)` that returns a `SampleRow`; or its `read`
returns tokens and loss mask. Document starts, positions and masks follow `_get_ltor_masks_and_position_ids`
(megatron-core 0.16.1, datasets/gpt_dataset.py): a document ends with its end-of-document token, which belongs to it;
the first token of a sample begins a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from relayrun.errors import ConfigError, FatalTrainingError

if TYPE_CHECKING:
    from relayrun.config.sections.data import DataSection

DocumentLengths = Sequence[Sequence[int] | None] | None
"""Tokens of each document for rows that know them; None: unknown."""


def document_lengths(inputs: npt.NDArray[np.int64], eod: int, own: DocumentLengths = None) -> list[list[int]]:
    """Return the tokens of each document, row by row: `reset_attention_mask`. `inputs` is int64 [batch, sequence].
    `own` takes precedence for rows that have it."""
    rows = []
    for number, row in enumerate(inputs):
        if own is not None and (known := own[number]) is not None:
            rows.append([*known])
            continue
        ends = np.flatnonzero(row[:-1] == eod) + 1
        rows.append(np.diff(ends, prepend=0, append=len(row)).tolist())
    return rows


def document_positions(inputs: npt.NDArray[np.int64], eod: int, own: DocumentLengths = None) -> npt.NDArray[np.int64]:
    """Return positions in documents, int64 [batch, sequence]: `reset_position_ids`. `own` as in `document_lengths`."""
    at = np.arange(inputs.shape[1])
    rows = [np.asarray(row, np.int64) for row in document_lengths(inputs, eod, own)]
    return np.stack([at - np.repeat(np.cumsum(row) - row, row) for row in rows])


@dataclass(slots=True, kw_only=True)  # frozen would take four times as long to make, twice for each sample
class SampleRow:
    """A sample."""

    tokens: npt.NDArray[np.signedinteger[Any]]
    """Token ids, int64 or int32 [seq_length + 1]: inputs, and targets shifted by one."""
    lengths: Sequence[int] | None = None
    """Tokens of each document of the row, padding last; they sum to seq_length. Attention stays inside a document and
    positions restart at 0. None: as set by `data.reset_attention_mask` and `data.reset_position_ids`."""
    loss_mask: npt.NDArray[np.float32] | None = None
    """1 where the loss of an input's target counts, float32 [seq_length]; None: everywhere."""
    padding: int = 0
    """Inputs that are padding."""
    windows: int = 1
    """Windows, or parts of windows, in the row."""


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """The samples of a micro-batch."""

    tokens: npt.NDArray[np.signedinteger[Any]]
    """Token ids, int64 or int32 [rows, seq_length + 1]."""
    lengths: Sequence[Sequence[int] | None] | None = None
    """Lengths of each row, as in `SampleRow`; None: no row has any."""
    loss_mask: npt.NDArray[np.float32] | None = None
    """Loss masks, float32 [rows, seq_length]; None: no row has one."""
    padding: int = 0
    """Padding inputs in all rows."""
    windows: int = 0
    """Windows in all rows."""

    @classmethod
    def stack(cls, rows: Sequence[SampleRow]) -> Self:
        """Stack rows of equal length."""
        masks = None
        if any(row.loss_mask is not None for row in rows):
            ones = np.ones(len(rows[0].tokens) - 1, np.float32)
            masks = np.stack([ones if row.loss_mask is None else row.loss_mask for row in rows])
        return cls(
            tokens=np.stack([row.tokens for row in rows]),
            lengths=[row.lengths for row in rows] if any(row.lengths is not None for row in rows) else None,
            loss_mask=masks,
            padding=sum(row.padding for row in rows),
            windows=sum(row.windows for row in rows),
        )


class RowMasks:
    """Computes the loss mask, positions and document lengths of rows, as the settings of `data` ask."""

    def __init__(
        self, data: DataSection, *, eod: int | None, counted: npt.NDArray[np.int64] | None, vocabulary_size: int
    ) -> None:
        """`counted`: target tokens that count (`data.mask_tokens_except`); None: all. Raises ConfigError if a setting
        needs an end-of-document token, and there is none."""
        if eod is None and data.depends_on_ends:
            words = "reset_position_ids, reset_attention_mask and eod_mask_loss need an end-of-document token"
            raise ConfigError(f"{words}, and this tokenizer has none", where="data")
        end = -1 if eod is None else eod  # -1 equals no token
        # computed once: each goes through all data sets
        self._masks_loss = data.masks_loss
        self.restarts_positions = data.restarts_positions
        self.attends_documents = data.attends_documents
        self._loss_end = end if data.eod_mask_loss else -1
        self._position_end = end if data.reset_position_ids else -1
        self._document_end = end if data.reset_attention_mask else -1
        self._counted: npt.NDArray[np.float32] | None = None
        if counted is not None:
            self._counted = np.zeros(vocabulary_size, np.float32)
            self._counted[counted] = 1

    def loss(self, rows: RowBatch) -> npt.NDArray[np.float32] | None:
        """Return 1 for each token that counts in the loss, float32 [batch, sequence]; None: all count."""
        if self._masks_loss:
            inputs = rows.tokens[:, :-1]
            counts = np.ones(inputs.shape, np.float32) if rows.loss_mask is None else rows.loss_mask
            counts = counts if self._loss_end < 0 else counts * (inputs != self._loss_end)
            return counts if self._counted is None else counts * self._counted[rows.tokens[:, 1:]]
        if rows.loss_mask is not None:
            words = "a data set of the mixture gives a loss mask, and none was announced"
            raise FatalTrainingError(words, hint="set data.mixture.NAME.loss_mask=true")
        return None

    def positions(self, rows: RowBatch) -> npt.NDArray[np.int64] | None:
        """Return positions in documents, int64 [batch, sequence]; None: they never restart."""
        if not self.restarts_positions:
            return None
        return document_positions(rows.tokens[:, :-1], self._position_end, rows.lengths)

    def documents(self, rows: RowBatch) -> list[list[int]] | None:
        """Return the tokens of each document that attention is restricted to; None: plain causal attention."""
        if not self.attends_documents:
            return None
        return document_lengths(rows.tokens[:, :-1], self._document_end, rows.lengths)


def read_row(dataset: Any, epoch: int, i: int) -> SampleRow:
    """Return row i of an epoch of a `relayrun.tokens.order.datasets.Dataset`, from its `row` or its `read`. Raises
    FatalTrainingError for a loss mask that does not fit the tokens."""
    if (row := getattr(dataset, "row", None)) is not None:
        found: SampleRow = row(epoch, i)
        return found
    read = dataset.read(epoch, i)
    if not isinstance(read, tuple):
        return SampleRow(tokens=read)
    tokens, mask = read[0], np.asarray(read[1], np.float32)
    if mask.shape != (len(tokens) - 1,):
        raise FatalTrainingError(
            f"{type(dataset).__name__}.read({epoch}, {i}) gives a loss mask of shape {list(mask.shape)} with "
            f"{len(tokens)} tokens",
            hint=f"a mask has one number for each input: {len(tokens) - 1}",
        )
    return SampleRow(tokens=tokens, loss_mask=mask)


def row_statistics(counts: Sequence[int], *, tokens: int, samples: int) -> dict[str, Any]:
    """Return log fields from the padding and windows of an iteration's rows; empty if unknown."""
    if not counts:
        return {}
    padding, windows = counts
    return {"useful_tokens": tokens - padding, "padding_share": padding / tokens, "windows_per_row": windows / samples}
