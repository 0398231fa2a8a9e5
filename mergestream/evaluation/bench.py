"""The benchmark: run every method in every order, score the merged models, write the results."""

from __future__ import annotations

import multiprocessing
import os
import platform
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mergestream import __version__
from mergestream.errors import MergestreamError, UsageError
from mergestream.escaping import one_line
from mergestream.evaluation.results import Results, Run
from mergestream.evaluation.rows import Row
from mergestream.evaluation.streams import Outcome, Stream, model_digest, run_streams, score
from mergestream.evaluation.suites import Suite, key_of

OnProgress = Callable[[str, int, int], None]
"""Called with a description, the number of finished parts and their total"""
QUIET_SECONDS = 60
"""Seconds between two lines of progress"""


@dataclass(frozen=True)
class Plan:
    """Which methods are run in which orders, and how much of each run is scored."""

    rows: Sequence[Row]
    orders: int = 10
    seed: int = 0
    workers: int = 2
    last_only: bool = False
    """Score only the last model of every order: enough for ACC, and cheap enough for whole test sets.

    Else the whole accuracy matrix of the first order, and of the others its diagonal and last row, for ACC and BWT."""

    def order(self, tasks: Sequence[str], index: int) -> tuple[str, ...]:
        """Shuffle the tasks with the seed ``seed + index``."""
        shuffled = list(tasks)
        random.Random(self.seed + index).shuffle(shuffled)
        return tuple(shuffled)

    def streams(self, tasks: Sequence[str]) -> list[Stream]:
        """List all runs: each row in each of its orders."""
        return [
            Stream(
                row,
                self.order(tasks, index),
                self.seed + index,
                "last" if self.last_only else "ends" if index else "all",
            )
            for index in range(self.orders)
            for row in self.rows
            if index == 0 or not (self.last_only and row.method().commutative)  # else all orders give the same
        ]


def run_bench(suite: Suite, plan: Plan, output: Path, on_progress: OnProgress, command: str = "") -> Results:
    """Run the plan and save the results to ``output`` after every stream.

    What ``output`` already has of the same base, experts and test data is not measured again.
    """
    if plan.orders < 1:
        raise UsageError("a benchmark needs at least one order")
    suite.prepare(lambda task, done, total: on_progress(f"expert {task}", done, total), plan.workers)
    _check_output(suite, output)
    digests = {
        "base": model_digest(suite.base()),
        "experts": {task: model_digest(suite.expert(task)) for task in suite.tasks},
        "test_data": {name: suite.evaluation_key(name) for name in (*suite.tasks, *suite.beside)},
    }
    results = _recorded(suite, digests, output) or _measure_models(suite, digests, plan.workers, on_progress)
    settings = {
        "command": command,
        "orders": plan.orders,
        "seeds": [plan.seed + index for index in range(plan.orders)],
        "protocol": suite.protocol(),
        "versions": {"mergestream": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    return _run_plan(suite, plan, replace(results, settings=settings), output, on_progress)


def _check_output(suite: Suite, output: Path) -> None:
    """Refuse to write results into a model or a store."""
    models = {model.resolve() for model in (suite.base(), *map(suite.expert, suite.tasks))}
    for directory in (output.resolve(), *output.resolve().parents):
        is_store = (directory / "manifest.json").is_file() and any(
            (directory / name).exists() for name in ("lock", "steps")
        )
        if is_store or directory in models:
            raise MergestreamError(f"{output} is inside {directory}, a model or a store; choose another place")


def _recorded(suite: Suite, digests: dict[str, Any], output: Path) -> Results | None:
    """Load earlier results of the same models and test data, if there are any."""
    if not (output / "results.json").is_file():
        return None
    found = Results.load(output)
    is_same = (found.suite, found.tasks, found.digests) == (suite.name, list(suite.tasks), digests)
    return found if is_same else None


def _measure_models(suite: Suite, digests: dict[str, Any], workers: int, on_progress: OnProgress) -> Results:
    """Score the base and the experts; the results have no runs yet."""
    calls = [(suite, task, digests["base"], digests["experts"][task]) for task in suite.tasks]
    scored = sorted(_run_all(_score_base_and_expert, calls, workers, "scoring the base and the experts", on_progress))
    return Results(
        suite=suite.name,
        model=suite.model_name,
        tasks=list(suite.tasks),
        pretrained={task: of_base for task, of_base, _ in scored},
        fine_tuned={task: of_expert for task, _, of_expert in scored},
        runs=[],
        beside=score(suite, suite.base(), suite.beside, digests["base"]),
        model_bytes=sum(file.stat().st_size for file in suite.base().glob("*.safetensors")),
        digests=digests,
    )


def _score_base_and_expert(suite: Suite, task: str, base: str, expert: str) -> tuple[str, float, float]:
    """Return a task, and the accuracy of the base and of the task's expert, which have these digests."""
    of_base, of_expert = score(suite, suite.base(), [task], base), score(suite, suite.expert(task), [task], expert)
    return task, of_base[task], of_expert[task]


def _run_plan(suite: Suite, plan: Plan, results: Results, output: Path, on_progress: OnProgress) -> Results:
    """Run what the results lack; rows that differ in the readout alone share a store in each order."""
    asked = plan.streams(suite.tasks)
    known = {(run.method, tuple(run.order)): run.steps for run in results.runs}
    wanted = {stream.outcome for stream in asked}
    others = [run for run in results.runs if (run.method, tuple(run.order)) not in wanted]
    groups: dict[Outcome, dict[Outcome, Stream]] = {}
    for stream in asked:
        if not stream.is_measured(suite, known.get(stream.outcome, [])):
            groups.setdefault((stream.row.method_key, stream.order), {}).setdefault(stream.outcome, stream)
    work = output / "work"
    calls = [(suite, list(group.values()), work / key_of(key)) for key, group in groups.items()]
    for found in _run_all(run_streams, calls, plan.workers, "streams", on_progress):
        known |= found
        runs = [Run(s.row.key, s.seed, list(s.order), known[s.outcome]) for s in asked if s.outcome in known]
        results = replace(results, runs=[*runs, *others])
        results.save(output)
    results.save(output)
    shutil.rmtree(work, ignore_errors=True)
    return results


def _run_all(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], workers: int, what: str, on_progress: OnProgress
) -> Iterator[Any]:
    """Run the calls in parallel, and yield and report every one that is finished."""
    on_progress(what, 0, len(calls))
    for done, result in enumerate(run_parallel(function, calls, workers), 1):
        on_progress(what, done, len(calls))
        yield result


def progress_lines() -> OnProgress:
    """Return a function that shows progress: a line per finished part, or after a while."""
    printed = time.monotonic()

    def print_line(what: str, done: int, total: int) -> None:
        nonlocal printed
        if done == total or time.monotonic() - printed >= QUIET_SECONDS:
            print(f"{one_line(what)}: {done} of {total}", file=sys.stderr, flush=True)
            printed = time.monotonic()

    return print_line


def run_parallel(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], workers: int) -> Iterator[Any]:
    """Call ``function(*call)`` for every call and yield results as they are finished.

    Each worker is a process with one thread, so that results do not depend on the number of workers. A single worker
    runs in this process.
    """
    if not calls:
        return
    if workers == 1:
        _start_worker()
        yield from (function(*call) for call in calls)
        return
    context = multiprocessing.get_context("spawn")  # a forked torch may deadlock
    pool = ProcessPoolExecutor(min(workers, len(calls)), context, _start_worker)
    try:
        for future in as_completed([pool.submit(function, *call) for call in calls]):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    torch.set_num_threads(1)
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent is killed; otherwise the next run would find this worker writing the same files."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
