"""Matrices as matplotlib figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.figure import Figure

from benchmarks.figures import label
from mergestream.report.tables import short_names

MAX_CELL_VALUES = 20
"""Cells carry their values up to this many in a row"""
MAX_TICKS = 40
"""Names beside a matrix, and rows up to which it grows"""


def heat_map(
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float],
    form: str,
    quantity: str,
    *,
    title: str = "",
) -> Figure:
    """A matrix in colours between ``limits``, with its values in the cells; None leaves a cell empty."""
    size = 2.2 + 0.42 * min(len(rows), MAX_TICKS)
    figure = Figure(figsize=(size + 0.8, size), layout="constrained")
    axes = figure.subplots()
    known = np.array([[math.nan if value is None else value for value in row] for row in values])
    image = axes.imshow(known, vmin=limits[0], vmax=limits[1])
    axes.set_xticks(*_ticks(columns), rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(*_ticks(rows), fontsize=8)
    axes.set_title(label(title))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if len(columns) <= MAX_CELL_VALUES:
        brightness = image.to_rgba(known)[..., :3] @ (0.3, 0.59, 0.11)
        for i, j in np.argwhere(~np.isnan(known)):
            text = format(round(known[i, j], 2) + 0.0, form)  # 0.00 and not -0.00
            colour = "black" if brightness[i, j] > 0.5 else "white"
            axes.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, label=quantity, shrink=0.8)
    return figure


def _ticks(names: Iterable[str]) -> tuple[range, list[str]]:
    """Positions on an axis, and the names there; of too many names every second, third, …"""
    short = [label(name) for name in short_names(names)]
    places = range(0, len(short), math.ceil(len(short) / MAX_TICKS) or 1)
    return places, [short[place] for place in places]
