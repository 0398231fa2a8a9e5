"""The benchmark: every method, every order, each a stream through a store, scored after each step."""

from __future__ import annotations

import math
import os
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mergestream import __version__
from mergestream.engine import Engine, LocalEngine
from mergestream.errors import UsageError
from mergestream.evaluation.results import Results, Run
from mergestream.evaluation.rows import CONTINUAL_FINE_TUNING, Row, Sweep
from mergestream.evaluation.streams import Entries, Stream, run_stream, score_beside, score_individual
from mergestream.evaluation.suites.base import Suite
from mergestream.evaluation.workers import run_parallel
from mergestream.export.places import refuse_within
from mergestream.files import write_json
from mergestream.report.metrics import Spread, average_accuracy

OnProgress = Callable[[str, int, int], None]  # what, done, in all


@dataclass(frozen=True)
class Plan:
    """``full_orders``: for how many of the orders the whole accuracy matrix is measured; ACC and BWT need only
    its diagonal and its last row. ``finetune_orders``: how many orders continual fine-tuning is trained in.
    ``last_only``: of every order the last model alone is scored, which is enough for ACC and cheap enough for
    whole test sets."""

    rows: Sequence[Row]
    orders: int = 10
    seed: int = 0
    full_orders: int = 3
    finetune_orders: int = 1
    workers: int = 2
    last_only: bool = False
    engine: Engine = field(default_factory=lambda: LocalEngine(1))
    """Who merges, in each of the workers"""

    def check(self, suite: Suite) -> None:
        """Whatever is wrong with the plan is told before any work."""
        if self.orders < 1:
            raise UsageError("a benchmark needs at least one order")
        if not suite.can_fine_tune and any(row.name == CONTINUAL_FINE_TUNING for row in self.rows):
            raise UsageError(f"the suite {suite.name} has no training data, so it cannot be fine-tuned continually")

    def order(self, tasks: Sequence[str], index: int) -> tuple[str, ...]:
        """The ``index``-th order of arrival; its seed is ``seed + index``."""
        shuffled = list(tasks)
        random.Random(self.seed + index).shuffle(shuffled)
        return tuple(shuffled)

    def entries(self, index: int) -> Entries:
        if self.last_only:
            return "last"
        return "all" if index < self.full_orders else "ends"

    def streams(self, tasks: Sequence[str]) -> list[Stream]:
        return [
            Stream(row, self.order(tasks, index), self.seed + index, self.entries(index))
            for index in range(self.orders)
            for row in self.rows
            if index < self._orders_of(row)
        ]

    def _orders_of(self, row: Row) -> int:
        """A last model that does not depend on the order is made once."""
        if row.name == CONTINUAL_FINE_TUNING:
            return self.finetune_orders
        return 1 if self.last_only and row.method().commutative else self.orders


def run_bench(suite: Suite, plan: Plan, output: Path, on_progress: OnProgress, command: str = "") -> Results:
    """Run the plan, write the results to ``output``; what is there already is not computed again."""
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
    refuse_within(output, suite.base(), *map(suite.expert, suite.tasks))


def run_sweep(
    suite: Suite, plan: Plan, sweep: Sweep, output: Path, on_progress: OnProgress
) -> dict[str, dict[str, Any]]:
    """ACC after the last model for every value of one parameter: {method: {value: {mean, std, count}}}."""
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
    """Tables and figures of the results; returns their names."""
    from mergestream.evaluation.figures import draw_all
    from mergestream.evaluation.tables import per_task_table, table1

    table1(results).write(output, "table1")
    per_task_table(results).write(output, "per-task")
    return ["table1", "per-task", *draw_all(results, output)]


def write_sweep(table: dict[str, dict[str, Any]], sweep: Sweep, output: Path) -> str:
    """The table of a sweep and its figure; returns their name."""
    from mergestream.evaluation.figures import draw_sweep

    name = f"sweep-{sweep.parameter}"
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / f"{name}.json", table)
    draw_sweep(table, sweep.parameter, output, name)
    return name


def score_individuals(suite: Suite, workers: int, on_progress: OnProgress) -> tuple[dict[str, float], dict[str, float]]:
    total = 2 * len(suite.tasks)
    with counted("scoring the base and the experts", total, on_progress) as count:
        scored = list(run_parallel(score_individual, [(suite, task) for task in suite.tasks], workers, count))
    return {task: base for task, base, _ in sorted(scored)}, {task: expert for task, _, expert in sorted(scored)}


def run_streams(
    suite: Suite, streams: Sequence[Stream], directory: Path, plan: Plan, on_progress: OnProgress
) -> list[Run]:
    """All streams, side by side; the result is in the order of ``streams``. Seeds may give the same order."""
    calls = {_outcome(stream): (suite, stream, directory / stream.key(suite), plan.engine) for stream in streams}
    found = {}
    with counted("streams", sum(call[1].measurements for call in calls.values()), on_progress) as count:
        for result in run_parallel(run_stream, list(calls.values()), plan.workers, count):
            found[result["method"], tuple(result["order"]), result["entries"]] = result["steps"]
    return [Run(stream.row.key, stream.seed, list(stream.order), found[_outcome(stream)]) for stream in streams]


def _outcome(stream: Stream) -> tuple[str, tuple[str, ...], str]:
    return stream.row.key, stream.order, stream.entries


@contextmanager
def counted(what: str, total: int, on_progress: OnProgress) -> Iterator[Callable[..., None]]:
    """A handler for ("done", n) events that adds them up."""
    done = 0

    def count(_: str, amount: int) -> None:
        nonlocal done
        done += amount
        on_progress(what, min(done, total), total)

    on_progress(what, 0, total)
    yield count
    on_progress(what, total, total)


def cosines(suite: Suite, on_progress: OnProgress) -> list[list[float]]:
    """Cosine similarity of the experts' task vectors, one tensor of all experts in memory at a time."""
    import torch

    from mergestream.base.model import BaseModel
    from mergestream.checkpoints import open_checkpoint
    from mergestream.experts import make_task_vector, open_expert

    products = torch.zeros(len(suite.tasks), len(suite.tasks), dtype=torch.float64)
    with ExitStack() as files:
        base = files.enter_context(open_checkpoint(suite.base()))
        model = BaseModel.examine(base, measure=False)
        experts = [files.enter_context(closing(open_expert(suite.expert(task)))) for task in suite.tasks]
        vectors = [make_task_vector(model, base, expert) for expert in experts]
        for done, name in enumerate(model.merged, 1):
            size = model.tensors[name].numel
            deltas = torch.stack([vector.elements(name)(0, size).double() for vector in vectors])
            products += deltas @ deltas.T
            on_progress("cosine similarities", done, len(model.merged))
    norms = products.diagonal().clamp_min(1e-300).sqrt()
    table: list[list[float]] = (products / norms[:, None] / norms).tolist()
    return [[0.0 if math.isnan(value) else value for value in row] for row in table]


def machine() -> dict[str, Any]:
    """What the numbers were made on."""
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
