"""The figures that go with a model card, as matplotlib figure objects and PNG files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mergestream.report import diagnostics
from mergestream.report.diagnostics import Similarity

if TYPE_CHECKING:
    from mergestream.store import Expert, StoreDirectory

BLUE, GREY = "#2f6fde", "#8a94a3"
COLOURS = ("#b3470b", "#ee9a5d", "#fbe3d2", "#f4f5f7", "#d3e2fa", "#6d9deb", "#1d4fa5")
MOST_LABELLED = 12


def write_pictures(directory: Path, store: StoreDirectory) -> dict[str, str]:
    """Draw what a model card shows; returns the names of the files and what they show, in words."""
    figures = {"lambda.png": (scaling(store.history), "The scaling factor λ after each expert, against √t")}
    if store.manifest.step > 1:
        drawn = similarity(diagnostics.similarity(store))
        figures["similarity.png"] = (drawn, "Cosine similarity of the experts' task vectors")
    for name, (figure, _) in figures.items():
        figure.savefig(directory / name, dpi=120, metadata={"Software": None})
    return {name: words for name, (_, words) in figures.items()}


def scaling(history: Sequence[Expert]) -> Figure:
    """λ_t against √t (the paper's adaptive scaling factors)."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(history) + 1)
    axes.plot(steps, [math.sqrt(t) for t in steps], "--", color=GREY, label="√t")
    axes.plot(steps, [entry.lambda_ for entry in history], "o-", color=BLUE, label="λ")
    axes.set(xlabel="experts absorbed, t", ylabel="scaling factor", xlim=(0.5, max(len(history), 4) + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def similarity(similarity: Similarity) -> Figure:
    """The cosine matrix; colours are for the cosines between different experts."""
    from matplotlib.colors import LinearSegmentedColormap

    names, count = similarity.experts, len(similarity.experts)
    values = [
        [math.nan if i == j or value is None else value for j, value in enumerate(row)]
        for i, row in enumerate(similarity.cosines)
    ]
    limit = max(0.05, *(abs(value) for row in values for value in row if not math.isnan(value)), 0.0)
    size = 2.2 + 0.42 * count
    figure = Figure(figsize=(size + 0.8, size), layout="constrained")
    axes = figure.subplots()
    scale = LinearSegmentedColormap.from_list("mergestream", COLOURS)
    image = axes.imshow(values, cmap=scale, vmin=-limit, vmax=limit)
    axes.set_xticks(range(count), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(count), names)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if count <= MOST_LABELLED:
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                if not math.isnan(value):
                    colour = "white" if abs(value) > 0.7 * limit else "black"
                    axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, label="cosine", shrink=0.8)
    return figure
