"""The chart of OPCM's scaling factors, and the colours of all charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mergestream.evaluation.tables import label

GREY = "#8a94a3"
CURVES = ("#2f6fde", "#d9730d", "#2e8b57", "#8e44ad", "#c0392b", "#16808f", "#7a6a2f", "#444b55")
INK = "#010203"


def scaling(curves: Mapping[str, Sequence[float]], bands: Mapping[str, Sequence[float]] | None = None) -> Figure:
    """λ_t against √t (the paper's adaptive scaling factors), one curve per name; ``bands`` are error bars."""
    count = max(map(len, curves.values()), default=0)
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(GREY)
    axes.tick_params(colors=INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.set(xlabel="experts absorbed, t", ylabel="scaling factor λ", xlim=(0.5, max(count, 4) + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    steps = range(1, count + 1)
    axes.plot(steps, [math.sqrt(t) for t in steps], "--", color=GREY, label="√t")
    for number, (name, values) in enumerate(curves.items()):
        colour, band, x = CURVES[number % len(CURVES)], (bands or {}).get(name), steps[: len(values)]
        axes.errorbar(x, values, band, fmt="o-", markersize=4, capsize=2, color=colour, label=label(name))
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure
