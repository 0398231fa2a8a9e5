"""Continual fine-tuning, a baseline of the paper: one model is fine-tuned on one task after the other.

    python -m benchmarks.finetuning SUITE -o DIR [--tasks K] [--test-limit N] [--seed S]

It takes long, so it is run in one order. Adds the row "C. Fine-Tuned" to the results and tables of
``mergestream bench SUITE -o DIR``, which come first.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.suites.experts import ExpertSuite
from mergestream.errors import MergestreamError
from mergestream.evaluation.bench import Plan
from mergestream.evaluation.results import Results, Run
from mergestream.evaluation.streams import score, split_scores
from mergestream.evaluation.suites import open_suite
from mergestream.evaluation.tables import write_tables

NAME = "continual_finetuning"


def fine_tune(suite: ExpertSuite, order: tuple[str, ...], work: Path) -> list[dict[str, Any]]:
    """Train θ^(t−1) on task t and score it on all tasks; θ^(1) is the first task's expert."""
    model = suite.expert(order[0])
    steps = []
    for step, task in enumerate(order):
        if step:
            start, model = model, work / f"model-{step:02d}"
            model.mkdir()
            suite.fine_tune(start, task, model)
        names = [*order, *(suite.beside if step == len(order) - 1 else ())]
        steps.append({"task": task, **split_scores(suite, score(suite, model, names))})
    return steps


def add_row(suite: ExpertSuite, output: Path, seed: int = 0) -> Results:
    """Run continual fine-tuning in the first order of a benchmark, and add it to the benchmark's results."""
    results = Results.load(output)
    if results.tasks != list(suite.tasks):
        raise MergestreamError(f"{output} has the results of other tasks: {', '.join(results.tasks)}")
    order = Plan([], seed=seed).order(suite.tasks, 0)
    with TemporaryDirectory(dir=output) as work:
        run = Run(NAME, seed, list(order), fine_tune(suite, order, Path(work)))
    results = replace(results, runs=[run, *(other for other in results.runs if other.method != NAME)])
    results.save(output)
    return results


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", metavar="SUITE")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--tasks", type=int, metavar="K")
    parser.add_argument("--test-limit", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    options = parser.parse_args(arguments)
    suite = open_suite(options.suite, options.tasks, options.test_limit)
    if not isinstance(suite, ExpertSuite):
        parser.error(f"the suite {suite.name} has no training data")
    write_tables(add_row(suite, options.output, options.seed), options.output)


if __name__ == "__main__":
    main()
