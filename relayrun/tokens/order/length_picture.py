"""The picture of lengths against positions: a panel for each folder, a line for each file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from relayrun.errors import ConfigError
from relayrun.tokens.order.length_order import LengthOrder

PICTURE_SUFFIXES = (".svg", ".png", ".pdf")
MAX_CURVES = 100
"""Files of a folder that are drawn, spread over all of them."""


def check_picture_name(picture: Path) -> None:
    """Raise ConfigError for a name that tells no kind of picture."""
    if picture.suffix not in PICTURE_SUFFIXES:
        raise ConfigError(
            f"{picture.name!r} names no kind of picture",
            where="--picture",
            hint=f"end it in {', '.join(PICTURE_SUFFIXES)}",
        )


def draw_length_picture(orders: Mapping[str, LengthOrder], picture: Path, *, unit: str) -> None:
    """Write the panels of some folders, by their titles. `unit`: of the lengths. All panels have the same scales."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "relayrun", "svg.fonttype": "none"}):  # the same picture has the same bytes
        figure = Figure(figsize=(1 + 4.5 * len(orders), 4), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(orders), sharex=True, sharey=True, squeeze=False)[0]
        for panel, (title, order) in zip(panels, orders.items(), strict=True):
            number = min(MAX_CURVES, len(order.curves))
            for index in np.linspace(0, max(0, len(order.curves) - 1), number).round().astype(int).tolist():
                curve = order.curves[index]
                panel.plot(curve.positions, curve.means, linewidth=0.8, alpha=max(0.15, 1 / number**0.5))
            lines = [title, *_figures(order)]
            panel.set(title="\n".join(lines), xlabel="position in the file", xlim=(0, 1), yscale="log")
            panel.title.set_fontsize(9)
            panel.grid(visible=True, linewidth=0.3)
        panels[0].set_ylabel(f"mean length, {unit}")
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(picture.suffix)
        figure.savefig(picture, metadata=metadata)


def _figures(order: LengthOrder) -> list[str]:
    found = []
    if order.lag_1_correlation is not None:
        found.append(f"lag-1 correlation {order.lag_1_correlation:.3f}")
    if order.batch_mean_variance_ratio is not None:
        found.append(f"variance of batch means / of independent draws {order.batch_mean_variance_ratio:.2f}")
    return found
