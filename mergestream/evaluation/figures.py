"""The figure of a benchmark, as PNG and SVG."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from mergestream.evaluation.results import Results
from mergestream.report import figures
from mergestream.report.metrics import Spread, seen_means


def save(figure: Figure, directory: Path, name: str) -> list[str]:
    """Write ``name.png`` and ``name.svg`` and return these names; the same results give the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    figures.save(figure, directory / f"{name}.png", dpi=150)
    with matplotlib.rc_context({"svg.hashsalt": "mergestream"}):
        figures.save(figure, directory / f"{name}.svg", metadata={"Date": None})
    return [f"{name}.png", f"{name}.svg"]


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
        (line,) = axes.plot(steps, centre, "o-", markersize=3, label=figures.label(results.label(method)))
        low, high = ([100 * (s.mean + side * (s.std or 0)) for s in spreads] for side in (-1, 1))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    base = 100 * sum(results.pretrained.values()) / len(results.pretrained)
    axes.axhline(base, color="grey", linestyle=":", label="Pre-Trained (all tasks)")
    labels = {"xlabel": "number of tasks", "ylabel": "mean accuracy on merged tasks (%)"}
    axes.set(**labels, title=figures.label(results.model))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
