"""``mergestream bench``: merge the experts of a suite by several methods and score every task."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import argument, arguments_of, at_least, command_line, engine_argument, make_engine, switch
from mergestream.cli.printing import answer, print_text, say
from mergestream.errors import UsageError

EXAMPLES = """
mergestream bench my-suite.yaml --methods opcm,average --evaluate 'python score.py {model} {task}' -o results
mergestream bench clip --model vit-b-32 --tasks 8 --orders 10 -o results
mergestream bench benchmarks/suites/vision.py --tasks 8 --orders 10 -o results
mergestream bench text --methods opcm --orders 3 --sweep alpha=0.1:1.0:0.1 -o results    # in a checkout
"""


@dataclass(frozen=True)
class Options:
    suite: str = argument(metavar="SUITE", help="clip, text, vision, or a suite file (.py, .yaml), which is executed")
    output: str = argument("-o", "--output", required=True, metavar="DIR", help="directory; results in it are kept")
    methods: str = argument(
        "--methods",
        default="all",
        metavar="LIST",
        help="comma-separated, as in opcm,opcm:projection=paper,average (all: the paper's rows and every other method)",
    )
    orders: int = argument("--orders", type=at_least(1), default=10, metavar="N", help="number of shuffled orders (10)")
    seed: int = argument("--seed", type=int, default=0, metavar="S", help="seed of the first order (0)")
    tasks: int | None = argument("--tasks", type=at_least(2), metavar="K", help="use the first K tasks (8)")
    sweep: str | None = argument(
        "--sweep",
        metavar="P=A:B:S",
        help="a row for every value of a parameter, as in alpha=0.1:1.0:0.1; only the last models are scored",
    )
    full_orders: int = argument(
        "--full-orders",
        type=at_least(0),
        default=3,
        metavar="N",
        help="orders with the whole accuracy matrix; the others measure only what ACC and BWT need (3)",
    )
    finetune_orders: int = argument(
        "--finetune-orders", type=at_least(0), default=1, metavar="N", help="orders of continual fine-tuning (1)"
    )
    last_only: bool = switch("--last-only", "score only the last model of every order: ACC without BWT, faster")
    test_limit: int | None = argument(
        "--test-limit", type=at_least(1), metavar="N", help="test samples per task (text, vision: 500)"
    )
    model: str | None = argument("--model", help="model of the clip suite: vit-b-32 (the default), vit-b-16, vit-l-14")
    evaluate: str | None = argument(
        "--evaluate",
        metavar="CMD",
        help="for your own suite: a command that prints the accuracy, as in 'python score.py {model} {task}'",
    )
    workers: int | None = argument(
        "--workers", type=at_least(1), metavar="N", help="parallel processes (all cores; 1 on a cluster)"
    )
    engine: str = engine_argument()


def run(options: Options) -> None:
    from mergestream.evaluation import explain_missing_packages

    with explain_missing_packages():
        _bench(options)


def _bench(options: Options) -> None:
    from mergestream.evaluation.bench import Plan, run_bench, write_report
    from mergestream.evaluation.rows import parse_rows, sweep_rows
    from mergestream.evaluation.suites.loading import open_suite
    from mergestream.evaluation.workers import available_cores, progress_bars
    from mergestream.storage import local_path

    suite = open_suite(options.suite, **arguments_of(open_suite, options))
    on_cluster = options.engine != "local"  # where each further process might start a cluster of its own
    rows = parse_rows(options.methods, trains=suite.can_fine_tune)
    plan = Plan(
        sweep_rows(rows, options.sweep) if options.sweep else rows,
        orders=options.orders,
        seed=options.seed,
        full_orders=options.full_orders,
        finetune_orders=options.finetune_orders,
        workers=options.workers or (1 if on_cluster else available_cores()),
        last_only=options.last_only or options.sweep is not None,
        engine=make_engine(options.engine, workers=None if on_cluster else 1),
    )
    output = local_path(options.output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"-o {output} is a file; name a directory for the results")
    with progress_bars() as on_progress:
        results = run_bench(suite, plan, output, on_progress, command_line())
    files = ["results.json", *write_report(results, output)]
    answer({"output": str(output), "files": files, "summary": results.summary()})
    print_text((output / "table1.md").read_text("utf-8"))
    say(f"written to {output}: {', '.join(files)}")
