"""The command line of the benchmark: ``mergestream bench``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mergestream.cli.options import at_least
from mergestream.errors import UsageError

QUIET_SECONDS = 60  # in a log, a long run says at least this often that it lives


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", metavar="SUITE", help="text, vision, clip, or a file of your own (.py, .yaml)")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="where results, tables and figures go")
    parser.add_argument(
        "--methods",
        default="all",
        metavar="LIST",
        help="comma-separated, as in opcm,opcm:projection=paper,average (all: the paper's rows and every other method)",
    )
    parser.add_argument("--orders", type=at_least(1), default=10, metavar="N", help="shuffled orders of arrival (10)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first order; the next has S+1 (0)")
    parser.add_argument("--tasks", type=at_least(2), metavar="K", help="the first K tasks of the suite (8)")
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
    parser.add_argument("--test-limit", type=at_least(1), metavar="N", help="test samples a task (500; clip: all)")
    parser.add_argument("--model", default="vit-b-32", help="of the clip suite: vit-b-32, vit-b-16 or vit-l-14")
    parser.add_argument(
        "--evaluate",
        metavar="CMD",
        help="of a suite of your own: a command that prints the accuracy, as in 'python score.py {model} {task}'",
    )
    parser.add_argument("--workers", type=at_least(1), metavar="N", help="processes side by side (all cores)")


def run(arguments: argparse.Namespace) -> int:
    from mergestream.evaluation.requirements import missing_packages_told

    with missing_packages_told():
        return bench(arguments)


def bench(arguments: argparse.Namespace) -> int:
    from mergestream.evaluation.bench import Plan, run_bench, run_sweep
    from mergestream.evaluation.rows import Sweep, parse_rows
    from mergestream.evaluation.suites.catalogue import open_suite
    from mergestream.evaluation.workers import available_cores

    suite = open_suite(
        arguments.suite,
        tasks=arguments.tasks,
        test_limit=arguments.test_limit,
        model=arguments.model,
        evaluate=arguments.evaluate,
    )
    plan = Plan(
        parse_rows(arguments.methods, trains=suite.can_fine_tune),
        orders=arguments.orders,
        seed=arguments.seed,
        full_orders=arguments.full_orders,
        finetune_orders=arguments.finetune_orders,
        workers=arguments.workers or available_cores(),
        last_only=arguments.last_only,
    )
    output = Path(arguments.output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"-o {output} is a file; name a directory for the results")
    if arguments.sweep:
        from mergestream.evaluation.cache import write_json
        from mergestream.evaluation.figures import draw_sweep

        sweep = Sweep.parse(arguments.sweep)
        with progress_bars() as on_progress:
            table = run_sweep(suite, plan, sweep, output, on_progress)
        write_json(output / f"sweep-{sweep.parameter}.json", table)
        name = draw_sweep(table, sweep.parameter, output)
        print(json.dumps(table, indent=1))
        print(f"written to {output}: {name}.json, {name}.png, {name}.svg")
        return 0
    with progress_bars() as on_progress:
        results = run_bench(suite, plan, output, on_progress, command_line(arguments))
    names = write_report(results, output)
    print((output / "table1.md").read_text("utf-8"))
    print(f"written to {output}: results.json, results.parquet, {', '.join(names)}")
    return 0


def write_report(results: object, output: Path) -> list[str]:
    """Tables and figures of the results; returns their names."""
    from mergestream.evaluation.figures import draw_all
    from mergestream.evaluation.results import Results
    from mergestream.evaluation.tables import per_task_table, table1

    assert isinstance(results, Results)
    table1(results).write(output, "table1")
    per_task_table(results).write(output, "per-task")
    return ["table1", "per-task", *draw_all(results, output)]


def command_line(arguments: argparse.Namespace) -> str:
    """The call that made the results, for the record: what differs from the defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parts = ["mergestream", "bench", arguments.suite]
    for action in parser._actions:
        value = getattr(arguments, action.dest, None)
        if action.option_strings and action.dest not in ("help", "output") and value not in (None, action.default):
            parts += [action.option_strings[-1], *([] if action.nargs == 0 else [str(value)])]
    return " ".join([*parts, "-o", arguments.output])


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Bars with the time left on a terminal; elsewhere a line whenever something is finished, and one a minute."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        finished: set[str] = set()
        told = time.monotonic()

        def tell(what: str, done: int, total: int) -> None:
            nonlocal told
            if done == total and what not in finished:
                finished.add(what)
                print(f"{what}: done", file=sys.stderr, flush=True)
            elif done < total and time.monotonic() - told >= QUIET_SECONDS:
                print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)
            else:
                return
            told = time.monotonic()

        yield tell
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True),
    )  # fmt: skip
    with Progress(*columns, console=console) as bars:
        known = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(what, total=total)
            bars.update(known[what], completed=done, total=total)

        yield show
