"""How time and memory grow with the number of experts and with the size of the model.

    python -m benchmarks.growth                  measure and plot
    python -m benchmarks.growth --curves size    measure one of the two curves again, and plot
    python -m benchmarks.growth --curves         plot earlier measurements

Every point is one run in a separate process. Other tools stop where their runs take too long.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cases
from benchmarks.cases import FUSIONBENCH, MERGEKIT, OURS, Contender
from benchmarks.checkpoints import MODELS, Family, family
from benchmarks.measure import ROOT, Cost, run
from benchmarks.suite import STORES
from mergestream import OPCM, Average
from mergestream.methods.base import Method

RESULTS = ROOT / "docs" / "results" / "performance"
MANY = 20
SIZES = ("llama-200mb", "llama-1gb", "llama-4gb")


@dataclass(frozen=True)
class Point:
    curve: str
    """The plot: experts or size"""
    who: str
    model: str
    experts: int
    wall: float
    cpu: float
    anonymous: int

    @property
    def gigabytes(self) -> float:
        shape = MODELS[self.model]
        return sum(map(math.prod, shape.tensors.values())) * shape.dtype.itemsize / 1e9


def against_experts() -> Iterator[Point]:
    """Measure 1 … 20 experts: a store adds one each time; a batch merge and FusionBench process all of them."""
    for model, method, label in (("vit-b-32", OPCM(), "OPCM, add"), ("llama-200mb", Average(), "average, add")):
        experts = family(model, MANY)
        for number, cost in _adds(experts, method):
            yield _point("experts", f"{OURS}: {label}", model, number, cost)
    vision, language = family("vit-b-32", MANY), family("llama-200mb", MANY)
    for number in (1, 5, 10, 20):
        some = Family(language.model, language.base, language.experts[:number])
        merges = {f"{OURS}: task arithmetic, merge": cases.merge(some, "task_arithmetic", "scale=0.3")}
        if cases.have_peers():
            merges[f"{MERGEKIT}: task arithmetic"] = cases.mergekit(some, "task_arithmetic")
        for who, contender in merges.items():
            yield _point("experts", who, some.model, number, _once(contender))
    for number in (2, 5) if cases.have_peers() else ():
        some = Family(vision.model, vision.base, vision.experts[:number])
        cost = _once(cases.fusionbench(some, "opcm"))
        step = Cost(cost.work["steps"][-1], math.nan, cost.anonymous)
        yield _point("experts", f"{FUSIONBENCH}: OPCM, one step", some.model, number, step)


def against_size() -> Iterator[Point]:
    """Measure models of the same width and growing depth; the largest tensor stays the same."""
    ties = ("mode=streaming", "trim=model", "density=0.2", "scale=1")
    for model in SIZES:
        experts = family(model, 3)
        merges = {
            f"{OURS}: task arithmetic, merge of 3": cases.merge(experts, "task_arithmetic", "scale=0.3"),
            f"{OURS}: TIES, merge of 3": cases.merge(experts, "ties", *ties),
        }
        if cases.have_peers():
            merges[f"{MERGEKIT}: task arithmetic, merge of 3"] = cases.mergekit(experts, "task_arithmetic")
        if cases.have_peers() and model in SIZES[:2]:
            merges[f"{MERGEKIT}: TIES, merge of 3"] = cases.mergekit(experts, "ties")
        floor = cases.floor((experts.base, *experts.experts), experts.base)
        _once(floor)  # so that the files are cached for all
        for who, contender in {"the floor of a merge of 3": floor, **merges}.items():
            yield _point("size", who, model, 3, _once(contender))
        two = Family(model, experts.base, experts.experts[:2])
        *_, (_, cost) = _adds(two, Average())
        yield _point("size", f"{OURS}: average, add", model, 2, cost)
        if model in SIZES[:2]:
            *_, (_, cost) = _adds(two, OPCM())
            yield _point("size", f"{OURS}: OPCM, add", model, 2, cost)


def _adds(experts: Family, method: Method) -> Iterator[tuple[int, Cost]]:
    store = cases.store_with(STORES / "growth", experts, method, 0)
    for number, expert in enumerate(experts.experts, start=1):
        yield number, _once(cases.add(store, expert, number - 1))
    cases.fresh(store)


def _once(contender: Contender) -> Cost:
    contender.prepare()
    return run(contender.command)


def _point(curve: str, who: str, model: str, experts: int, cost: Cost) -> Point:
    wall, cpu = cost.work.get("wall", cost.wall), cost.work.get("cpu", cost.cpu)
    print(f"{who}, {model}, {experts}: {wall:.2f} s, {cost.anonymous / 1e6:.0f} MB", file=sys.stderr, flush=True)
    return Point(curve, who, model, experts, wall, cpu, cost.anonymous)


CURVES = {"experts": against_experts, "size": against_size}


def plot(points: Sequence[Point], directory: Path) -> None:
    """Plot time and memory against experts and size, in four panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8.5), layout="constrained")
    columns: dict[str, tuple[str, Callable[[Point], float]]] = {
        "experts": ("experts", lambda point: point.experts),
        "size": ("size of the checkpoint (GB, bfloat16)", lambda point: point.gigabytes),
    }
    rows: tuple[tuple[str, Callable[[Point], float]], ...] = (
        ("seconds", lambda point: point.wall),
        ("peak anonymous memory (GB)", lambda point: point.anonymous / 1e9),
    )
    for column, (curve, (x_label, x)) in enumerate(columns.items()):
        chosen = [point for point in points if point.curve == curve]
        for row, (y_label, y) in enumerate(rows):
            axis: Any = axes[row][column]
            for who, model in dict.fromkeys((p.who, p.model if curve == "experts" else "") for p in chosen):
                line = [p for p in chosen if p.who == who and model in ("", p.model)]
                style = "o-" if who.startswith(OURS) else "s--"
                label = f"{who} ({model})" if model else who
                axis.plot([x(p) for p in line], [y(p) for p in line], style, markersize=4, label=label)
            axis.set(xlabel=x_label, ylabel=y_label, yscale="log" if row == 0 else "linear")
            axis.grid(alpha=0.3)
            if row:
                axis.set_ylim(bottom=0)
            else:
                axis.legend(fontsize=8)
    figure.savefig(directory / "growth.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory against the number of experts and the size.")
    parser.add_argument("--curves", nargs="*", choices=CURVES, default=list(CURVES), help="those to measure again")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = arguments.output / "growth.json"
    points = [Point(**entry) for entry in json.loads(results.read_text())] if results.exists() else []
    for curve in arguments.curves:
        points = [point for point in points if point.curve != curve] + list(CURVES[curve]())
        results.write_text(json.dumps([vars(point) for point in points], indent=1) + "\n")
    plot(points, arguments.output)


if __name__ == "__main__":
    main()
