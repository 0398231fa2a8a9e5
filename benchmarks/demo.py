"""``make demo``: merge four real experts one by one, and score every task after each.

MiniLM is fine-tuned on four text tasks (or the experts are taken from the cache), then a ledger, OPCM and averaging
absorb the experts in the same order, each in a store, and every merged model is scored on all four tasks.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergestream.evaluation.results import Results
    from mergestream.evaluation.suites import Suite

METHODS = ("ledger", "opcm", "average")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("-o", "--output", default="demo-output", metavar="DIR", help="output directory")
    output = Path(parser.parse_args(arguments).output)

    from mergestream.errors import MergestreamError

    try:
        run(output)
    except (MergestreamError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(output: Path) -> None:
    from mergestream.evaluation.bench import Plan, progress_lines, run_bench
    from mergestream.evaluation.rows import Row
    from mergestream.evaluation.suites import open_suite
    from mergestream.evaluation.tables import write_tables

    started = time.monotonic()
    suite = open_suite("text", tasks=4, test_limit=200)
    print(f"MiniLM and four text tasks ({', '.join(suite.tasks)}); four experts, fine-tuned here or from the cache.")
    plan = Plan([Row(method) for method in METHODS], orders=1, workers=os.cpu_count() or 1)
    results = run_bench(suite, plan, output, progress_lines(), "make demo")
    write_tables(results, output)
    print(accuracy_report(results))
    merged, page = merged_model(suite, results, output)
    print(f"merged model  {merged}   (transformers.AutoModel.from_pretrained loads it)")
    print(f"report        {page}")
    print(f"tables        {output}/table1.md, {output}/per-task.md")
    print(f"done in {time.monotonic() - started:.0f} s")


def accuracy_report(results: Results) -> str:
    """Format the accuracy matrix of each method, with ACC and BWT."""
    from mergestream.report.scores import average_accuracy, backward_transfer

    lines = []
    for method in METHODS:
        (run,) = results.methods[method]
        lines += ["", f"{results.label(method)}: accuracy (%) after each model", " " * 24 + _cells(run.order)]
        for step, row in enumerate(run.matrix):
            lines.append(f"{step + 1}: + {run.order[step]:<18}" + _cells([f"{100 * (v or 0):.1f}" for v in row]))
        acc, bwt = average_accuracy(run.matrix) or 0, backward_transfer(run.matrix) or 0
        lines.append(f"ACC {100 * acc:.1f}   BWT {100 * bwt:+.1f}")
    base, experts = ([known[task] for task in results.tasks] for known in (results.pretrained, results.fine_tuned))
    lines += ["", f"for comparison: base {100 * sum(base) / len(base):.1f}, "
                  f"experts on their own tasks {100 * sum(experts) / len(experts):.1f}", ""]  # fmt: skip
    return "\n".join(lines)


def _cells(values: list[str]) -> str:
    return "".join(f"{value:>14}" for value in values)


def merged_model(suite: Suite, results: Results, output: Path) -> tuple[Path, Path]:
    """Run the ledger again and keep the store, its merged model, and its report with the scores."""
    from mergestream.report.facts import Facts
    from mergestream.report.render import render_html
    from mergestream.report.scores import Scores, attach
    from mergestream.store.store import Store

    (run,) = results.methods["ledger"]
    path = output / "store"
    store = Store(path) if path.is_dir() else Store.create(path, base=suite.base())
    for task in run.order[len(store.history) :]:
        store.add(suite.expert(task), name=task)
    base, experts = ([known[task] for task in run.order] for known in (results.pretrained, results.fine_tuned))
    attach(store, Scores.of(run.order, run.matrix, base=base, experts=experts))
    merged, report = output / "merged", output / "report.html"
    if not merged.is_dir():
        store.export(merged)
    report.write_text(render_html(Facts.of(store)), encoding="utf-8")
    return merged, report


if __name__ == "__main__":
    sys.exit(main())
