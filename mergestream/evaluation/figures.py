"""The paper's figures, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mergestream.evaluation.results import Results
from mergestream.evaluation.rows import CONTINUAL_FINE_TUNING, Row
from mergestream.report import figures as pictures
from mergestream.report.figures import heat_map, label, scaling, similarity
from mergestream.report.metrics import Spread, seen_means

GIGABYTE = 1e9
Drawn = dict[str, Figure]
"""Figures by the suffix of their common name; empty if the results lack the data"""


def save(figure: Figure, directory: Path, name: str) -> None:
    """Write ``name.png`` and ``name.svg``; the same results give the same bytes."""
    import matplotlib

    directory.mkdir(parents=True, exist_ok=True)
    pictures.save(figure, directory / f"{name}.png", dpi=150)
    with matplotlib.rc_context({"svg.hashsalt": "mergestream"}):
        pictures.save(figure, directory / f"{name}.svg", metadata={"Date": None})


def draw_all(results: Results, directory: Path) -> list[str]:
    """Draw every figure that the results have data for; returns their names."""
    drawn = {
        "accuracy-matrices": accuracy_matrices(results),
        "accuracy-over-tasks": accuracy_over_tasks(results),
        "lambda": scaling_factor(results),
        "cosine-similarity": {"": similarity(results.tasks, results.cosines, f"Task vectors, {results.model}")},
        "memory": memory(results),
    }
    for name, figures in drawn.items():
        for suffix, figure in figures.items():
            save(figure, directory, name + suffix)
    return [name for name, figures in drawn.items() if figures]


def accuracy_matrices(results: Results) -> Drawn:
    """Draw A[i][j] of the first order for each method."""
    drawn = {}
    for method, (run, *_) in results.methods.items():
        if any(None in row for row in run.matrix):
            continue
        values = [[None if value is None else 100 * value for value in row] for row in run.matrix]
        steps = [f"{step}: + {task}" for step, task in enumerate(run.order, 1)]
        drawn["-" + method.replace(":", "-").replace("=", "-")] = heat_map(
            values, steps, run.order, (0, 100), ".0f", "accuracy (%)", title=results.label(method)
        )
    return drawn


def accuracy_over_tasks(results: Results) -> Drawn:
    """Draw the mean accuracy over the tasks merged so far, with a band of one standard deviation."""
    curves = {}
    for method, runs in results.methods.items():
        complete = [means for means in (seen_means(run.matrix) for run in runs) if None not in means]
        if complete:
            curves[method] = _means_and_deviations(list(zip(*complete, strict=True)), 100)
    if not curves:
        return {}
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    for method, (centre, band) in curves.items():
        steps = range(1, len(centre) + 1)
        bold = 2.4 if method == "opcm" else 1.3
        (line,) = axes.plot(steps, centre, marker="o", markersize=3, linewidth=bold, label=label(results.label(method)))
        low = [value - width for value, width in zip(centre, band, strict=True)]
        high = [value + width for value, width in zip(centre, band, strict=True)]
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    base = 100 * sum(results.pretrained.values()) / len(results.pretrained)
    axes.axhline(base, color="grey", linestyle=":", label="Pre-Trained (all tasks)")
    axes.set(xlabel="number of tasks", ylabel="mean accuracy on merged tasks (%)", title=label(results.model))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return {"": figure}


def scaling_factor(results: Results) -> Drawn:
    """Draw λ_t against √t for OPCM (the paper's figure of the adaptive scaling factor)."""
    curves, bands = {}, {}
    for method, runs in results.methods.items():
        if method.startswith("opcm") and "scaling=sqrt" not in method:
            columns = [[run.steps[step]["lambda"] for run in runs] for step in range(len(results.tasks))]
            curves[results.label(method)], bands[results.label(method)] = _means_and_deviations(columns)
    return {"": scaling(curves, bands)} if curves else {}


def _means_and_deviations(
    columns: Sequence[Sequence[float | None]], factor: float = 1
) -> tuple[list[float], list[float]]:
    """Return mean and deviation of every column with a measurement."""
    known = [spread for column in columns if (spread := Spread.of(column))]
    return [factor * spread.mean for spread in known], [factor * (spread.std or 0) for spread in known]


def memory(results: Results) -> Drawn:
    """Draw the bytes on disk needed to merge another expert: all models in batch, base and state in a stream."""
    steps = range(1, len(results.tasks) + 1)
    streams = {method: runs[0] for method, runs in results.methods.items() if method != CONTINUAL_FINE_TUNING}
    if not streams:
        return {}
    figure = Figure(figsize=(7.4, 4.2), layout="constrained")
    axes = figure.subplots()
    expert = results.expert_bytes or results.model_bytes
    batch = [(results.model_bytes + step * expert) / GIGABYTE for step in steps]
    axes.plot(steps, batch, "k--", label="batch: base and all models")
    alike: dict[tuple[float, ...], list[str]] = {}
    for method, run in streams.items():
        kept = tuple(round((results.model_bytes + step["state_bytes"]) / GIGABYTE, 3) for step in run.steps)
        alike.setdefault(kept, []).append(Row.parse(method).name)
    for kept, names in alike.items():
        axes.plot(steps, kept, marker="o", markersize=3, label=label(f"stream: {', '.join(dict.fromkeys(names))}"))
    axes.set(xlabel="models merged", ylabel="kept on disk (GB)", ylim=(0, None), title=label(results.model))
    axes.legend(fontsize=7)
    return {"": figure}


def draw_sweep(table: dict[str, dict[str, Any]], parameter: str, directory: Path, name: str) -> None:
    """Draw ACC against one parameter."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for method, values in table.items():
        known = {float(value): spread for value, spread in values.items() if spread}
        centre = [100 * spread["mean"] for spread in known.values()]
        band = [100 * (spread["std"] or 0) for spread in known.values()]
        name = label(Row.parse(method).label)
        axes.errorbar(list(known), centre, yerr=band, marker="o", markersize=3, capsize=2, label=name)
    axes.set(xlabel=label(parameter), ylabel="ACC (%)", title=label(f"ACC against {parameter}"))
    axes.legend(fontsize=8)
    save(figure, directory, name)
