"""Charts as matplotlib figures, from plain numbers: for the report, for model cards and for benchmarks."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mergestream.escaping import one_line
from mergestream.report.wording import short_names

if TYPE_CHECKING:
    from mergestream.store.manifest import Manifest

GREY = "#8a94a3"
CURVES = ("#2f6fde", "#d9730d", "#2e8b57", "#8e44ad", "#c0392b", "#16808f", "#7a6a2f", "#444b55")
DIVERGING = ("#b3470b", "#ee9a5d", "#fbe3d2", "#f4f5f7", "#d3e2fa", "#6d9deb", "#1d4fa5")
MAX_CELL_VALUES = 20
"""Cells carry their values up to this many in a row"""
MAX_TICKS = 40
"""Names beside a matrix, and rows up to which it grows"""
MAX_TITLE = 120
"""Characters of a title, or of a name in a legend"""
INK = "#010203"
"""The colour of text in a figure; on the page it becomes the page's own"""


def write_pictures(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Draw the picture of an OPCM store's model card; returns its file name with a description."""
    curve = scaling({"λ": [entry.lambda_ for entry in manifest.history]})
    save(curve, directory / "lambda.png", dpi=120, metadata={"Software": None})
    return {"lambda.png": "The scaling factor λ after each expert, against √t"}


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


def similarity(names: Sequence[str], cosines: Sequence[Sequence[float | None]], title: str = "") -> Figure:
    """The cosine matrix; the colours span the cosines between different experts."""
    others = [[None if i == j else value for j, value in enumerate(row)] for i, row in enumerate(cosines)]
    limit = max(0.05, *(abs(value) for row in others for value in row if value is not None), 0.0)
    colours = LinearSegmentedColormap.from_list("mergestream", DIVERGING)
    return heat_map(others, names, names, (-limit, limit), ".2f", "cosine", title=title, colours=colours)


def heat_map(
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float],
    form: str,
    quantity: str,
    *,
    title: str = "",
    colours: str | Colormap = "viridis",
) -> Figure:
    """A matrix in colours between ``limits``, with its values in the cells; None leaves a cell empty."""
    size = 2.2 + 0.42 * min(len(rows), MAX_TICKS)
    figure = Figure(figsize=(size + 0.8, size), layout="constrained")
    axes = figure.subplots()
    known = np.array([[math.nan if value is None else value for value in row] for row in values])
    image = axes.imshow(known, cmap=colours, vmin=limits[0], vmax=limits[1])
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
