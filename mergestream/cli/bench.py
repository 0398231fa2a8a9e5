"""The command bench."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from mergestream.cli.options import at_least
from mergestream.errors import UsageError

HELP = "merge a suite's experts in shuffled orders with several methods, and score every task after each step"
EXAMPLES = """
mergestream bench my-suite.yaml --methods opcm,average --evaluate 'python score.py {model} {task}' -o results
mergestream bench clip --model vit-b-32 --tasks 8 --orders 10 -o results
mergestream bench benchmarks/suites/vision.py --tasks 8 --orders 10 -o results
mergestream bench text --methods opcm --orders 3 --sweep alpha=0.1:1.0:0.1 -o results    (in a checkout)
"""


@dataclass(frozen=True)
class Options:
    suite: str
    output: str
    methods: str
    orders: int
    seed: int
    tasks: int | None
    sweep: str | None
    full_orders: int
    finetune_orders: int
    last_only: bool
    test_limit: int | None
    model: str | None
    evaluate: str | None
    workers: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", metavar="SUITE", help="clip, text, vision, or the file of a suite (.py, .yaml)")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="where results, tables and figures go")
    parser.add_argument(
        "--methods",
        default="all",
        metavar="LIST",
        help="comma-separated, as in opcm,opcm:projection=paper,average (all: the paper's rows and every other method)",
    )
    parser.add_argument("--orders", type=at_least(1), default=10, metavar="N", help="shuffled orders of arrival (10)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first order; the next has S+1 (0)")
    parser.add_argument("--tasks", type=at_least(2), metavar="K", help="the first K tasks of the suite (8 of ours)")
    parser.add_argument(
        "--sweep", metavar="P=A:B:S", help="ACC for every value of a parameter, as in alpha=0.1:1.0:0.1"
    )
    parser.add_argument(
        "--full-orders",
        type=at_least(0),
        default=3,
        metavar="N",
        help="orders with the whole accuracy matrix; the others have what ACC and BWT need (3)",
    )
    parser.add_argument(
        "--finetune-orders",
        type=at_least(0),
        default=1,
        metavar="N",
        help="orders of continual fine-tuning, which trains (1)",
    )
    parser.add_argument(
        "--last-only", action="store_true", help="score the last model of every order alone: ACC without BWT, cheaply"
    )
    parser.add_argument("--test-limit", type=at_least(1), metavar="N", help="test samples a task (text, vision: 500)")
    parser.add_argument("--model", help="of the clip suite: vit-b-32 (the default), vit-b-16 or vit-l-14")
    parser.add_argument(
        "--evaluate",
        metavar="CMD",
        help="of a suite of your own: a command that prints the accuracy, as in 'python score.py {model} {task}'",
    )
    parser.add_argument("--workers", type=at_least(1), metavar="N", help="processes side by side (all cores)")


def run(options: Options) -> int:
    from mergestream.evaluation.requirements import missing_packages_told

    with missing_packages_told():
        return _bench(options)


def _bench(options: Options) -> int:
    from mergestream.evaluation.bench import Plan, run_bench, run_sweep, write_report, write_sweep
    from mergestream.evaluation.progress import progress_bars
    from mergestream.evaluation.rows import Sweep, parse_rows
    from mergestream.evaluation.suites.catalogue import open_suite
    from mergestream.evaluation.workers import available_cores

    suite = open_suite(
        options.suite,
        tasks=options.tasks,
        test_limit=options.test_limit,
        model=options.model,
        evaluate=options.evaluate,
    )
    plan = Plan(
        parse_rows(options.methods, trains=suite.can_fine_tune),
        orders=options.orders,
        seed=options.seed,
        full_orders=options.full_orders,
        finetune_orders=options.finetune_orders,
        workers=options.workers or available_cores(),
        last_only=options.last_only,
    )
    output = Path(options.output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"-o {output} is a file; name a directory for the results")
    if options.sweep:
        sweep = Sweep.parse(options.sweep)
        with progress_bars() as on_progress:
            table = run_sweep(suite, plan, sweep, output, on_progress)
        name = write_sweep(table, sweep, output)
        print(json.dumps(table, indent=1))
        print(f"written to {output}: {name}.json, {name}.png, {name}.svg")
        return 0
    with progress_bars() as on_progress:
        results = run_bench(suite, plan, output, on_progress, command_line(options))
    names = write_report(results, output)
    print((output / "table1.md").read_text("utf-8"))
    print(f"written to {output}: results.json, results.parquet, {', '.join(names)}")
    return 0


def command_line(options: Options) -> str:
    """The call that made the results, for the record: what differs from the defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parts = ["mergestream", "bench", options.suite]
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        if action.option_strings and action.dest not in ("help", "output") and value not in (None, action.default):
            parts += [action.option_strings[-1], *([] if action.nargs == 0 else [str(value)])]
    return " ".join([*parts, "-o", options.output])
