"""The paper's numbers beside ours, and its figures, from the output of ``mergestream bench``.

    python -m benchmarks.paper DIR                     DIR/paper.md: Table 1 with the paper's numbers; figures
    python -m benchmarks.paper DIR --sweep alpha       DIR/sweep-alpha.png: ACC against a parameter

The figures are the accuracy over the tasks, the accuracy matrix of each method in its first order, and λ_t against √t
for OPCM.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.figures import accuracy_over_tasks, label, save, scaling
from benchmarks.heat_map import heat_map
from mergestream.evaluation.results import Results, Spread
from mergestream.evaluation.rows import Row
from mergestream.evaluation.tables import Table, table1

METRICS = {"": "acc", "ACC↑": "acc", "BWT↑": "bwt"}


@cache
def paper_results() -> dict[str, Any]:
    """Read the paper's printed numbers (``table1``, ``single_model``, …)."""
    loaded: dict[str, Any] = json.loads(Path(__file__).with_name("suites").joinpath("paper_results.json").read_bytes())
    return loaded


def table1_value(metric: str, method: str, arch: str, tasks: int) -> tuple[float, float | None] | None:
    """Return the paper's mean and standard deviation in percent, e.g. of ``("acc", "OPCM", "ViT-B/32", 8)``."""
    for entry in paper_results()["table1"]:
        if (entry["metric"], entry["method"], entry["arch"], entry["tasks"]) == (metric, method, arch, tasks):
            return entry["mean"], entry["std"]
    return None


def table_beside_paper(results: Results) -> Table:
    """Make Table 1 with a column of the paper's numbers, which are of the suite ``clip``."""
    table = table1(results)

    def cell(metric: str, method: str) -> str:
        value = table1_value(METRICS.get(metric, ""), method, results.model, len(results.tasks))
        if value is None:
            return "–"
        return f"{value[0]:.1f}" + (f"±{value[1]:.1f}" if value[1] is not None else "")

    rows = [(*row, cell(row[0], row[1])) for row in table.rows]
    return replace(table, header=(*table.header, "paper (not ours)"), rows=rows)


def accuracy_matrices(results: Results) -> Iterator[tuple[str, Figure]]:
    """Draw A[i][j] of the first order for each method."""
    for method, (run, *_) in results.methods.items():
        if any(None in row for row in run.matrix):
            continue
        values = [[None if value is None else 100 * value for value in row] for row in run.matrix]
        steps = [f"{step}: + {task}" for step, task in enumerate(run.order, 1)]
        figure = heat_map(values, steps, run.order, (0, 100), ".0f", "accuracy (%)", title=results.label(method))
        yield "accuracy-matrices-" + method.replace(":", "-").replace("=", "-"), figure


def scaling_factor(results: Results) -> Figure | None:
    """Draw λ_t against √t for OPCM (the paper's figure of the adaptive scaling factor)."""
    curves, bands = {}, {}
    for method, runs in results.methods.items():
        if method.startswith("opcm") and "scaling=sqrt" not in method:
            spreads = [Spread.of([run.steps[step]["lambda"] for run in runs]) for step in range(len(results.tasks))]
            known = [spread for spread in spreads if spread]
            curves[results.label(method)] = [spread.mean for spread in known]
            bands[results.label(method)] = [spread.std or 0 for spread in known]
    return scaling(curves, bands) if curves else None


def sweep(results: Results, parameter: str) -> Figure:
    """Draw ACC against a parameter, from the rows that have it."""
    curves: dict[str, dict[float, Spread]] = {}
    for method in results.methods:
        row = Row.parse(method)
        spread = results.spread(method, "acc")
        if spread and parameter in row.parameters:
            rest = {key: value for key, value in row.parameters.items() if key != parameter}
            curves.setdefault(replace(row, parameters=rest).label, {})[float(row.parameters[parameter])] = spread
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        centre = [100 * spread.mean for spread in values.values()]
        band = [100 * (spread.std or 0) for spread in values.values()]
        axes.errorbar(list(values), centre, yerr=band, marker="o", markersize=3, capsize=2, label=label(name))
    axes.set(xlabel=label(parameter), ylabel="ACC (%)", title=label(f"ACC against {parameter}"))
    axes.legend(fontsize=8)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--sweep", metavar="PARAMETER")
    options = parser.parse_args(arguments)
    directory: Path = options.directory
    results = Results.load(directory)
    if options.sweep:
        save(sweep(results, options.sweep), directory, f"sweep-{options.sweep}")
        return
    table_beside_paper(results).write(directory, "paper")
    if over_tasks := accuracy_over_tasks(results):
        save(over_tasks, directory, "accuracy-over-tasks")
    for name, figure in accuracy_matrices(results):
        save(figure, directory, name)
    if curve := scaling_factor(results):
        save(curve, directory, "lambda")


if __name__ == "__main__":
    main()
