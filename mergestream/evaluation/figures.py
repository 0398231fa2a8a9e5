"""The paper's figures, drawn from results: PNG to look at, SVG to print."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from mergestream.evaluation.results import Results
from mergestream.evaluation.rows import CONTINUAL_FINE_TUNING, Row
from mergestream.report.metrics import Spread, seen_means
from mergestream.report.pictures import heat_map, scaling, similarity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIGABYTE = 1e9


def save(figure: Figure, directory: Path, name: str) -> None:
    """As ``name.png`` and ``name.svg``; the same results give the same files."""
    import matplotlib

    directory.mkdir(parents=True, exist_ok=True)
    figure.savefig(directory / f"{name}.png", dpi=150)
    with matplotlib.rc_context({"svg.hashsalt": "mergestream"}):
        figure.savefig(directory / f"{name}.svg", metadata={"Date": None})


@contextmanager
def chart(directory: Path, name: str, size: tuple[float, float] = (6.4, 4.2)) -> Iterator[Axes]:
    """Axes to draw on, saved afterwards."""
    figure = Figure(figsize=size, layout="constrained")
    yield figure.subplots()
    save(figure, directory, name)


def draw_all(results: Results, directory: Path) -> list[str]:
    """Every figure that the results allow; returns their names."""
    drawn = []
    for name, draw in (
        ("accuracy-matrices", accuracy_matrices),
        ("accuracy-over-tasks", accuracy_over_tasks),
        ("lambda", scaling_factor),
        ("cosine-similarity", cosine_similarity),
        ("memory", memory),
    ):
        if draw(results, directory, name):
            drawn.append(name)
    return drawn


def accuracy_matrices(results: Results, directory: Path, name: str) -> bool:
    """A[i][j] of the first order, for each method."""
    first = {
        method: runs[0]
        for method, runs in results.methods.items()
        if all(value is not None for row in runs[0].matrix for value in row)
    }
    for method, run in first.items():
        values = [[None if value is None else 100 * value for value in row] for row in run.matrix]
        steps = [f"{step + 1}: + {task}" for step, task in enumerate(run.order)]
        drawn = heat_map(values, steps, run.order, (0, 100), ".0f", "accuracy (%)", title=results.label(method))
        save(drawn, directory, f"{name}-{_file_name(method)}")
    return bool(first)


def _file_name(method: str) -> str:
    return method.replace(":", "-").replace("=", "-")


def accuracy_over_tasks(results: Results, directory: Path, name: str) -> bool:
    """Mean accuracy over the tasks seen so far, with a band of one standard deviation over the orders."""
    curves = {}
    for method, runs in results.methods.items():
        complete = [means for means in (seen_means(run.matrix) for run in runs) if None not in means]
        if complete:
            curves[method] = [Spread.of(column) for column in zip(*complete, strict=True)]
    if not curves:
        return False
    with chart(directory, name, (8, 4.6)) as axes:
        for method, spreads in curves.items():
            known = [spread for spread in spreads if spread is not None]
            steps = range(1, len(known) + 1)
            centre = [100 * spread.mean for spread in known]
            band = [100 * (spread.std or 0) for spread in known]
            bold = 2.4 if Row.parse(method).key == "opcm" else 1.3
            (line,) = axes.plot(steps, centre, marker="o", markersize=3, linewidth=bold, label=results.label(method))
            low = [value - width for value, width in zip(centre, band, strict=True)]
            high = [value + width for value, width in zip(centre, band, strict=True)]
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        base = 100 * sum(results.pretrained.values()) / len(results.pretrained)
        axes.axhline(base, color="grey", linestyle=":", label="Pre-Trained (all tasks)")
        axes.set(xlabel="number of tasks", ylabel="mean accuracy on the tasks seen (%)", title=results.model)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return True


def scaling_factor(results: Results, directory: Path, name: str) -> bool:
    """λ_t against √t for OPCM (the paper's figure of the adaptive scaling factor)."""
    adaptive = {
        method: runs
        for method, runs in results.methods.items()
        if method.startswith("opcm") and "scaling=sqrt" not in method
    }
    if not adaptive:
        return False
    curves, bands = {}, {}
    for method, runs in adaptive.items():
        spreads = [Spread.of([run.steps[step]["lambda"] for run in runs]) for step in range(len(results.tasks))]
        known = [spread for spread in spreads if spread is not None]
        curves[results.label(method)] = [spread.mean for spread in known]
        bands[results.label(method)] = [spread.std or 0 for spread in known]
    save(scaling(curves, bands), directory, name)
    return True


def cosine_similarity(results: Results, directory: Path, name: str) -> bool:
    save(similarity(results.tasks, results.cosines, f"Task vectors, {results.model}"), directory, name)
    return True


def memory(results: Results, directory: Path, name: str) -> bool:
    """What must be kept to go on merging: all models in batch, the base and a state of fixed size in a stream."""
    steps = range(1, len(results.tasks) + 1)
    streams = {method: runs[0] for method, runs in results.methods.items() if method != CONTINUAL_FINE_TUNING}
    if not streams:
        return False
    with chart(directory, name, (7.4, 4.2)) as axes:
        batch = [(step + 1) * results.model_bytes / GIGABYTE for step in steps]
        axes.plot(steps, batch, "k--", label="batch: base and all models")
        drawn: dict[tuple[float, ...], list[str]] = {}
        for method, run in streams.items():
            kept = tuple((results.model_bytes + step["state_bytes"]) / GIGABYTE for step in run.steps)
            drawn.setdefault(tuple(round(value, 3) for value in kept), []).append(method)
        for kept, methods in drawn.items():
            label = ", ".join(dict.fromkeys(Row.parse(method).name for method in methods))
            axes.plot(steps, kept, marker="o", markersize=3, label=f"stream: {label}")
        axes.set(xlabel="models merged", ylabel="kept on disk (GB)", ylim=(0, None), title=results.model)
        axes.legend(fontsize=7)
    return True


def draw_sweep(table: dict[str, dict[str, Any]], parameter: str, directory: Path, name: str) -> None:
    """ACC against one parameter."""
    with chart(directory, name) as axes:
        for method, values in table.items():
            known = {float(value): spread for value, spread in values.items() if spread}
            centre = [100 * spread["mean"] for spread in known.values()]
            band = [100 * (spread["std"] or 0) for spread in known.values()]
            label = Row.parse(method).label
            axes.errorbar(list(known), centre, yerr=band, marker="o", markersize=3, capsize=2, label=label)
        axes.set(xlabel=parameter, ylabel="ACC (%)", title=f"ACC against {parameter}")
        axes.legend(fontsize=8)
