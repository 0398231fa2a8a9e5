"""Charts: accuracy over the tasks, OPCM's scaling factors; the colours and labels of all charts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mergestream.escaping import one_line
from mergestream.evaluation.results import Results, Spread
from mergestream.report.scores import Matrix, mean

GREY = "#8a94a3"
CURVES = ("#2f6fde", "#d9730d", "#2e8b57", "#8e44ad", "#c0392b", "#16808f", "#7a6a2f", "#444b55")
INK = "#010203"
MAX_TITLE = 120
"""Characters of a title, or of a name in a legend"""


def save(figure: Figure, directory: Path, name: str) -> str:
    """Write ``name.png`` and return the name of the file; the same results give the same bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of characters that no font has
        figure.savefig(directory / f"{name}.png", dpi=150)
    return f"{name}.png"


def label(text: str) -> str:
    """Format text for matplotlib: one line, with dollar signs that start no formula."""
    return one_line(text, MAX_TITLE).replace("$", r"\$")


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


def seen_means(matrix: Matrix) -> list[float | None]:
    """After each step, the mean over the tasks whose experts are in the store."""
    return [mean(row[: step + 1]) for step, row in enumerate(matrix)]


def accuracy_over_tasks(results: Results) -> Figure | None:
    """Draw the mean accuracy over the tasks merged so far, with a band of one standard deviation."""
    curves = {}
    for method, runs in results.methods.items():
        complete = [means for means in (seen_means(run.matrix) for run in runs) if None not in means]
        if complete:
            curves[method] = [spread for step in zip(*complete, strict=True) if (spread := Spread.of(step))]
    if not curves:
        return None
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    for method, spreads in curves.items():
        steps, centre = range(1, len(spreads) + 1), [100 * spread.mean for spread in spreads]
        (line,) = axes.plot(steps, centre, "o-", markersize=3, label=label(results.label(method)))
        low, high = ([100 * (s.mean + side * (s.std or 0)) for s in spreads] for side in (-1, 1))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    base = 100 * sum(results.pretrained.values()) / len(results.pretrained)
    axes.axhline(base, color="grey", linestyle=":", label="Pre-Trained (all tasks)")
    labels = {"xlabel": "number of tasks", "ylabel": "mean accuracy on merged tasks (%)"}
    axes.set(**labels, title=label(results.model))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
