"""How the lengths of documents lie in their files: sorted, or shuffled as independent draws would be.

Two figures, over neighbours in one file, with l the lengths of all documents, their mean and variance:

    lag-1 correlation          mean of (l[i] - mean)(l[i + 1] - mean) / variance; 0 of independent draws
    batch-mean variance ratio  variance of the means of batches of neighbours / (variance / batch); there 1

Sorted files have correlations near 1, and ratios far above 1: a batch has like lengths, and another one others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

CURVE_POINTS = 50
"""Stretches of a file whose means make its curve, at most."""

LengthArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LengthCurve:
    """The lengths of one file's documents against their position."""

    file: str
    documents: int
    positions: list[float]
    """Middles of equal stretches, as shares of the file's documents."""
    means: list[float]
    """Mean length of the documents of each stretch."""


@dataclass(frozen=True, kw_only=True)
class LengthOrder:
    """How lengths lie in the files of a folder."""

    batch: int
    """Documents of a batch."""
    lag_1_correlation: float | None
    """None where no file has two documents, or all are of one length."""
    lag_1_noise: float | None
    """Two standard deviations of the correlation of independent draws."""
    batch_mean_variance_ratio: float | None
    """None where there are fewer than two whole batches."""
    curves: list[LengthCurve]

    def record(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


def measure_length_order(files: Sequence[tuple[str, LengthArray]], *, batch: int) -> LengthOrder:
    """Look at the lengths of the documents of each file, by its name. Files without documents have no curve."""
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
