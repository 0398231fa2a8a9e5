"""Charts as matplotlib figures, from plain numbers: for the report, for model cards and for benchmarks."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mergestream.escaping import one_line

GREY = "#8a94a3"
CURVES = ("#2f6fde", "#d9730d", "#2e8b57", "#8e44ad", "#c0392b", "#16808f", "#7a6a2f", "#444b55")
MAX_TITLE = 120
"""Characters of a title, or of a name in a legend"""
INK = "#010203"
"""The colour of text in a figure; on the page it becomes the page's own"""


def save(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure; characters that no font has become boxes, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(path, **options)


def inline_svg(figure: Figure) -> str:
    """A figure as an SVG element of an HTML page, in the page's text colour; the same figure gives the same text."""
    out = StringIO()
    unknown = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with (
        matplotlib.rc_context({"svg.hashsalt": "mergestream", "svg.fonttype": "none"}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(out, format="svg", transparent=True, metadata=unknown)
    text = out.getvalue().replace(INK, "currentColor")
    # Namespaces, names of groups and fonts: the page has its own.
    return re.sub(r' xmlns(:\w+)?="[^"]*"|(?<=<g) id="[^"]*"| font-family: [^;]*;', "", text[text.index("<svg") :])


def label(text: str, limit: int = MAX_TITLE) -> str:
    """Text for matplotlib: one line, with dollar signs that start no formula."""
    return one_line(text, limit).replace("$", r"\$")


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
