"""Texts in pieces that are encoded apart: between them stand bytes whose ids are known, and are filled in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from relayrun.tokens.readers.texts import Texts
from relayrun.tokens.tokenize.encode.libraries import Encoded, Engine

Positions = npt.NDArray[np.int64]


def encode_pieces(
    engine: Engine,
    texts: Texts,
    begins: Positions,
    ends: Positions,
    ids: npt.NDArray[np.uint32],
    cuts: Sequence[Positions],
) -> Encoded:
    """The ids of all texts, where the bytes from `begins[i]` to `ends[i]` have the one id `ids[i]`.

    What stands between them, and between `cuts`, is encoded by `engine` as texts of their own. All places count from
    the first byte used; those of the spans ascend, and none reaches over another or over the end of a text.
    """
    used, documents = texts.used, texts.offsets - texts.offsets[0]
    borders = np.zeros(used.size + 1, np.int8)
    borders[begins] += 1
    borders[ends] -= 1
    inside = np.cumsum(borders[:-1], dtype=np.int8).astype(np.bool_)
    before = np.zeros(used.size + 1, np.int64)  # bytes that are taken out, before each byte
    np.cumsum(inside, out=before[1:])
    starts = np.unique(np.concatenate([cut - before[cut] for cut in (documents, begins, *cuts)]))
    others, lengths = engine.encode(Texts(data=used[~inside], offsets=starts))
    bounds = np.zeros(len(starts), np.int64)
    np.cumsum(lengths, out=bounds[1:])

    def tokens_before(places: Positions) -> Positions:
        return np.asarray(bounds[np.searchsorted(starts, places - before[places])])

    out = np.empty(others.size + ids.size, np.uint32)
    filled = np.zeros(out.size, np.bool_)
    filled[tokens_before(begins) + np.arange(ids.size)] = True
    out[filled], out[~filled] = ids, others
    return out, np.diff(tokens_before(documents) + np.searchsorted(begins, documents))
