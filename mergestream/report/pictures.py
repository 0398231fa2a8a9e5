"""Charts as matplotlib figure objects, from plain numbers: for model cards, and for the results of a benchmark."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mergestream.escaping import one_line

if TYPE_CHECKING:
    from mergestream.report.diagnostics import Similarity
    from mergestream.store.manifest import Manifest

BLUE, GREY = "#2f6fde", "#8a94a3"
CURVES = (BLUE, "#d9730d", "#2e8b57", "#8e44ad", "#c0392b", "#16808f", "#7a6a2f", "#444b55")
DIVERGING = ("#b3470b", "#ee9a5d", "#fbe3d2", "#f4f5f7", "#d3e2fa", "#6d9deb", "#1d4fa5")
MOST_LABELLED = 20
"""Cells carry their values up to this many in a row."""
MOST_NAMED = 40
"""Rows up to which a matrix grows, and names beside it."""
LONGEST_NAME, LONGEST_TITLE = 40, 120
"""Characters of a name beside a matrix, of a title or in a legend"""


def write_pictures(directory: Path, manifest: Manifest, found: Similarity) -> dict[str, str]:
    """Draw what a model card shows; returns the names of the files and what they show, in words."""
    figures: dict[str, tuple[Figure, str]] = {}
    if manifest.is_opcm:
        curve = scaling({"λ": [entry.lambda_ for entry in manifest.history]})
        figures["lambda.png"] = (curve, "The scaling factor λ after each expert, against √t")
    if manifest.step > 1:
        shown = found.of_experts(found.chosen())
        of = f"{len(shown.experts)} of " if len(shown.experts) < len(found.experts) else ""
        words = f"Cosine similarity of {of}the experts' task vectors"
        figures["similarity.png"] = (similarity(shown.experts, shown.cosines), words)
    for name, (figure, _) in figures.items():
        save(figure, directory / name, dpi=120, metadata={"Software": None})
    return {name: words for name, (_, words) in figures.items()}


def save(figure: Figure, path: Path, **options: Any) -> None:
    """Names may have characters that no font here has: they are drawn as boxes, and nobody needs to be told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(path, **options)


def label(text: str, limit: int = LONGEST_TITLE) -> str:
    """A name as matplotlib writes it: short, and no formula, whatever it has between two dollars."""
    return one_line(text, limit).replace("$", r"\$")


def scaling(curves: Mapping[str, Sequence[float]], bands: Mapping[str, Sequence[float]] | None = None) -> Figure:
    """λ_t against √t (the paper's adaptive scaling factors), a curve a name; ``bands`` are the ± of its points."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    count = max(map(len, curves.values()), default=0)
    steps = range(1, count + 1)
    axes.plot(steps, [math.sqrt(t) for t in steps], "--", color=GREY, label="√t")
    for number, (name, values) in enumerate(curves.items()):
        colour, band, x = CURVES[number % len(CURVES)], (bands or {}).get(name), steps[: len(values)]
        axes.errorbar(x, values, band, fmt="o-", markersize=4, capsize=2, color=colour, label=label(name))
    axes.set(xlabel="experts absorbed, t", ylabel="scaling factor λ", xlim=(0.5, max(count, 4) + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    return figure


def similarity(names: Sequence[str], cosines: Sequence[Sequence[float | None]], title: str = "") -> Figure:
    """The cosine matrix; colours are for the cosines between different experts."""
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
    size = 2.2 + 0.42 * min(len(rows), MOST_NAMED)
    figure = Figure(figsize=(size + 0.8, size), layout="constrained")
    axes = figure.subplots()
    known = np.array([[math.nan if value is None else value for value in row] for row in values])
    image = axes.imshow(known, cmap=colours, vmin=limits[0], vmax=limits[1])
    axes.set_xticks(*_ticks(columns), rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(*_ticks(rows), fontsize=8)
    axes.set_title(label(title))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if len(columns) <= MOST_LABELLED:
        brightness = image.to_rgba(known)[..., :3] @ (0.3, 0.59, 0.11)
        for i, j in np.argwhere(~np.isnan(known)):
            shown = format(round(known[i, j], 2) + 0.0, form)  # 0.00 and not -0.00
            colour = "black" if brightness[i, j] > 0.5 else "white"
            axes.text(j, i, shown, ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, label=quantity, shrink=0.8)
    return figure


def _ticks(names: Sequence[str]) -> tuple[range, list[str]]:
    """The places of names on an axis, and what is written there: where they are too many, every second, third, …"""
    places = range(0, len(names), math.ceil(len(names) / MOST_NAMED) or 1)
    return places, [label(names[place], LONGEST_NAME) for place in places]
