"""The benchmark: run every method in every order, score the merged models, write results and figures."""

from __future__ import annotations

import math
import os
import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mergestream import Engine, LocalEngine, __version__, task_vectors
from mergestream.errors import MergestreamError, UsageError
from mergestream.evaluation.results import Results, Run
from mergestream.evaluation.rows import CONTINUAL_FINE_TUNING, Row, Sweep
from mergestream.evaluation.streams import Entries, Stream, run_stream, score_beside, score_individual
from mergestream.evaluation.suites.base import Suite
from mergestream.evaluation.workers import run_parallel
from mergestream.files import write_json
from mergestream.report.metrics import Spread, average_accuracy

OnProgress = Callable[[str, int, int], None]
"""Called with a description, the number of finished parts and their total"""


@dataclass(frozen=True)
class Plan:
    """Which methods are run in which orders, and how much of each run is scored."""

    rows: Sequence[Row]
    orders: int = 10
    seed: int = 0
    full_orders: int = 3
    """Orders with the whole accuracy matrix; ACC and BWT need only its diagonal and last row"""
    finetune_orders: int = 1
    """Orders of continual fine-tuning, which trains"""
    workers: int = 2
    last_only: bool = False
    """Score only the last model of every order: enough for ACC, and cheap enough for whole test sets"""
    engine: Engine = field(default_factory=lambda: LocalEngine(1))
    """The engine that merges in each worker"""

    def check(self, suite: Suite) -> None:
        """Refuse a plan that the suite cannot run."""
        if self.orders < 1:
            raise UsageError("a benchmark needs at least one order")
        if not suite.can_fine_tune and any(row.name == CONTINUAL_FINE_TUNING for row in self.rows):
            raise UsageError(f"the suite {suite.name} has no training data, so it cannot be fine-tuned continually")

    def order(self, tasks: Sequence[str], index: int) -> tuple[str, ...]:
        """Shuffle the tasks with the seed ``seed + index``."""
        shuffled = list(tasks)
        random.Random(self.seed + index).shuffle(shuffled)
        return tuple(shuffled)

    def streams(self, tasks: Sequence[str]) -> list[Stream]:
        """List all runs: each row in each of its orders."""
        return [
            Stream(row, self.order(tasks, index), self.seed + index, self._entries(index))
            for index in range(self.orders)
            for row in self.rows
            if index < self._count_orders(row)
        ]

    def _entries(self, index: int) -> Entries:
        if self.last_only:
            return "last"
        return "all" if index < self.full_orders else "ends"

    def _count_orders(self, row: Row) -> int:
        if row.name == CONTINUAL_FINE_TUNING:
            return self.finetune_orders
        # The last model of a commutative method is the same in every order.
        return 1 if self.last_only and row.method().commutative else self.orders


def run_bench(suite: Suite, plan: Plan, output: Path, on_progress: OnProgress, command: str = "") -> Results:
    """Run the plan and save the results to ``output``; finished parts of an earlier run are reused."""
    _prepare(suite, plan, output, on_progress)
    pretrained, fine_tuned = score_individuals(suite, plan.workers, on_progress)
    runs = run_streams(suite, plan.streams(suite.tasks), output / "streams", plan, on_progress)
    results = Results(
        suite=suite.name,
        model=suite.model_name,
        tasks=list(suite.tasks),
        pretrained=pretrained,
        fine_tuned=fine_tuned,
        runs=runs,
        cosines=cosines(suite, on_progress),
        beside=score_beside(suite),
        model_bytes=_weight_bytes(suite.base()),
        expert_bytes=sum(_weight_bytes(suite.expert(task)) for task in suite.tasks) // len(suite.tasks),
        settings={
            "command": command,
            "orders": plan.orders,
            "seeds": [plan.seed + index for index in range(plan.orders)],
            "full_orders": plan.full_orders,
            "finetune_orders": plan.finetune_orders,
            "protocol": suite.protocol(),
            "machine": machine(),
        },
    )
    results.save(output)
    return results


def _weight_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def _prepare(suite: Suite, plan: Plan, output: Path, on_progress: OnProgress) -> None:
    plan.check(suite)
    suite.prepare(lambda task, done, total: on_progress(f"expert {task}", done, total), plan.workers)
    models = {model.resolve() for model in (suite.base(), *map(suite.expert, suite.tasks))}
    for directory in (output.resolve(), *output.resolve().parents):
        is_store = (directory / "manifest.json").is_file() and any(
            (directory / name).exists() for name in ("lock", "steps")
        )
        if is_store or directory in models:
            raise MergestreamError(f"{output} is inside {directory}, a model or a store; choose another place")


def run_sweep(
    suite: Suite, plan: Plan, sweep: Sweep, output: Path, on_progress: OnProgress
) -> dict[str, dict[str, Any]]:
    """Measure ACC for every value of one parameter; returns {method: {value: {mean, std, count}}}."""
    swept = sweep.rows(list(plan.rows))
    _prepare(suite, plan, output, on_progress)
    table: dict[str, dict[str, Any]] = {}
    streams = [
        Stream(row, plan.order(suite.tasks, index), plan.seed + index, "last")
        for row in swept
        for index in range(plan.orders)
    ]
    runs = run_streams(suite, streams, output / "streams", plan, on_progress)
    for row in swept:
        spread = Spread.of([average_accuracy(run.matrix) for run in runs if run.method == row.key])
        parameters = {key: value for key, value in row.parameters.items() if key != sweep.parameter}
        rest = replace(row, parameters=parameters)
        table.setdefault(rest.key, {})[row.parameters[sweep.parameter]] = asdict(spread) if spread else None
    return table


def write_report(results: Results, output: Path) -> list[str]:
    """Write tables and figures; returns their names."""
    from mergestream.evaluation.figures import draw_all
    from mergestream.evaluation.tables import per_task_table, table1

    table1(results).write(output, "table1")
    per_task_table(results).write(output, "per-task")
    return ["table1", "per-task", *draw_all(results, output)]


def write_sweep(table: dict[str, dict[str, Any]], sweep: Sweep, output: Path) -> str:
    """Write the table and the figure of a sweep; returns their name."""
    from mergestream.evaluation.figures import draw_sweep

    name = f"sweep-{sweep.parameter}"
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / f"{name}.json", table)
    draw_sweep(table, sweep.parameter, output, name)
    return name


def score_individuals(suite: Suite, workers: int, on_progress: OnProgress) -> tuple[dict[str, float], dict[str, float]]:
    """Return the accuracy of the base and of each task's expert, by task."""
    calls = [(suite, task) for task in suite.tasks]
    scored = _run_all(score_individual, calls, workers, "scoring the base and the experts", on_progress)
    return {task: base for task, base, _ in sorted(scored)}, {task: expert for task, _, expert in sorted(scored)}


def run_streams(
    suite: Suite, streams: Sequence[Stream], directory: Path, plan: Plan, on_progress: OnProgress
) -> list[Run]:
    """Run all streams in parallel and return them in the given order; equal streams are run once."""
    calls = {stream.outcome: (suite, stream, directory / stream.key(suite), plan.engine) for stream in streams}
    found = dict(_run_all(run_stream, list(calls.values()), plan.workers, "streams", on_progress))
    return [Run(stream.row.key, stream.seed, list(stream.order), found[stream.outcome]) for stream in streams]


def _run_all(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], workers: int, what: str, on_progress: OnProgress
) -> list[Any]:
    """Run the calls in parallel, and report every one that is finished."""
    results = []
    on_progress(what, 0, len(calls))
    for result in run_parallel(function, calls, workers):
        results.append(result)
        on_progress(what, len(results), len(calls))
    return results


def cosines(suite: Suite, on_progress: OnProgress) -> list[list[float]]:
    """Return the cosine similarities of the experts' task vectors."""
    import torch

    products = torch.zeros(len(suite.tasks), len(suite.tasks), dtype=torch.float64)
    on_progress("cosine similarities", 0, 1)
    for _, deltas in task_vectors(suite.base(), [suite.expert(task) for task in suite.tasks]):
        rows = torch.stack([delta.double() for delta in deltas])
        products += rows @ rows.T
    on_progress("cosine similarities", 1, 1)
    norms = products.diagonal().clamp_min(1e-300).sqrt()
    table: list[list[float]] = (products / norms[:, None] / norms).tolist()
    return [[0.0 if math.isnan(value) else value for value in row] for row in table]


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that made the numbers."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.processor() or platform.machine()
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mergestream": __version__,
    }
