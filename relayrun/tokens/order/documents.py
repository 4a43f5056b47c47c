"""Where documents begin inside a batch, and what follows: positions, what a token may see, whose loss counts.

The rules are those of `_get_ltor_masks_and_position_ids` (megatron-core 0.16.1, datasets/gpt_dataset.py): a
document ends with its end-of-document token, which still belongs to it; a sample's first token begins one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def document_starts(inputs: npt.NDArray[np.int64], eod: int) -> npt.NDArray[np.int64]:
    """For each token the index of the first token of its document in this row; int64 [batch, sequence], as `inputs`.

    A token's position in its document is its index minus this. It may see the tokens from this index up to
    itself.
    """
    batch, length = inputs.shape
    starts = np.zeros((batch, length), dtype=np.int64)
    if length > 1:
        begins = np.where(inputs[:, :-1] == eod, np.arange(1, length), 0)
        np.maximum.accumulate(begins, axis=1, out=starts[:, 1:])
    return starts


DocumentLengths = Sequence[Sequence[int] | None] | None
"""Tokens of each document of rows that know it themselves (`relayrun.tokens.order.rows`); None: of those that do not."""


def document_lengths(inputs: npt.NDArray[np.int64], eod: int, own: DocumentLengths = None) -> list[list[int]]:
    """Tokens of each document, row by row: `reset_attention_mask`. `inputs` is int64 [batch, sequence].

    Rows that know their documents, `own`, have those.
    """
    rows = []
    for number, row in enumerate(inputs):
        if own is not None and (known := own[number]) is not None:
            rows.append([*known])
            continue
        ends = np.flatnonzero(row[:-1] == eod) + 1
        rows.append(np.diff(ends, prepend=0, append=len(row)).tolist())
    return rows


def document_positions(inputs: npt.NDArray[np.int64], eod: int, own: DocumentLengths = None) -> npt.NDArray[np.int64]:
    """Positions that start at 0 in each document, int64 [batch, sequence]: `reset_position_ids`.

    `own`: as for `lengths`.
    """
    result: npt.NDArray[np.int64] = np.arange(inputs.shape[1]) - document_starts(inputs, eod)
    for number, known in enumerate(own or ()):
        if known is not None:
            result[number] = np.concatenate([np.arange(length) for length in known])
    return result


def eod_loss_mask(inputs: npt.NDArray[np.int64], eod: int) -> npt.NDArray[np.float32]:
    """1, and 0 where the input is the end of a document; float32 [batch, sequence]: `eod_mask_loss`."""
    result: npt.NDArray[np.float32] = (inputs != eod).astype(np.float32)
    return result


def target_loss_mask(targets: npt.NDArray[np.int64], counted: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """1 where the target is a token that counts, else 0; float32 [batch, sequence]: `mask_tokens_except`.

    `counted`: for each token of the vocabulary whether its loss counts.
    """
    return counted[targets].astype(np.float32)
