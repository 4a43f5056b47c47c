"""What stands around the ids of a document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class DocumentFraming:
    """Ids before and behind every document, the type of the ids, and what becomes of a document without ids.

    A kept empty document gets neither BOS nor EOD, as in Megatron-LM's `preprocess_data.py`.
    """

    bos_id: int | None
    eod_id: int | None
    dtype: str
    """Name of the numpy type of a shard's ids."""
    keep_empty: bool

    def apply(
        self,
        ids: npt.NDArray[np.uint32],
        lengths: npt.NDArray[np.int64],
        room: Callable[[int], npt.NDArray[np.generic]] | None = None,
    ) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]:
        """Concatenated `ids`, shape [tokens], and `lengths`, shape [documents], of what goes into the shard.

        `room` gives the array for the ids, of `dtype`.
        """
        if not self.keep_empty:
            lengths = lengths[lengths > 0]
        inside = lengths > 0
        framed = lengths + inside * ((self.bos_id is not None) + (self.eod_id is not None))
        ends = np.cumsum(framed)
        total = int(framed.sum())
        out = np.empty(total, self.dtype) if room is None else room(total)
        text = np.ones(out.size, np.bool_)
        for token, places in ((self.bos_id, (ends - framed)[inside]), (self.eod_id, ends[inside] - 1)):
            if token is not None:
                out[places] = token
                text[places] = False
        out[text] = ids
        return out, framed
