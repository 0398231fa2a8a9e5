"""``mergestream bench``: merge the experts of a suite by several methods and score every task."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import argument, arguments_of, at_least, command_line, engine_argument, make_engine
from mergestream.cli.printing import answer, print_text, say
from mergestream.errors import UsageError


@dataclass(frozen=True)
class Bench:
    EXAMPLES = """
        mergestream bench my-suite.yaml --methods opcm,average --evaluate 'python score.py {model} {task}' -o results
        mergestream bench clip --model vit-b-32 --tasks 8 --orders 10 -o results
        mergestream bench benchmarks/suites/vision.py --tasks 8 --orders 10 -o results
        mergestream bench text --methods opcm --orders 3 --sweep alpha=0.1:1.0:0.1 -o results    # in a checkout
        """
    suite: str = argument(
        "SUITE", "clip, text, vision, or a suite file (.py, .yaml); its code and commands are executed"
    )
    output: str = argument(
        "-o --output DIR",
        "directory for results, tables and a figure; results that it already has are kept",
        required=True,
    )
    methods: str = argument(
        "--methods LIST",
        "comma-separated, as in opcm,opcm:projection=paper,average (all: the paper's rows and every other method)",
        default="all",
    )
    orders: int = argument("--orders N", "number of shuffled orders (10)", type=at_least(1), default=10)
    seed: int = argument("--seed S", "seed of the first order; the next is S+1 (0)", type=int, default=0)
    tasks: int | None = argument("--tasks K", "use the first K tasks (8 in the built-in suites)", type=at_least(2))
    sweep: str | None = argument(
        "--sweep P=A:B:S",
        "a row for every value of a parameter, as in alpha=0.1:1.0:0.1; only the last models are scored",
    )
    last_only: bool = argument("--last-only", "score only the last model of every order: ACC without BWT, faster")
    test_limit: int | None = argument("--test-limit N", "test samples per task (text, vision: 500)", type=at_least(1))
    model: str | None = argument("--model", "model of the clip suite: vit-b-32 (the default), vit-b-16, vit-l-14")
    evaluate: str | None = argument(
        "--evaluate CMD",
        "for your own suite: a command that prints the accuracy, as in 'python score.py {model} {task}'",
    )
    workers: int | None = argument("--workers N", "parallel processes (all cores; 1 on a cluster)", type=at_least(1))
    engine: str = engine_argument()

    def run(self) -> None:
        from mergestream.evaluation import explain_missing_packages

        with explain_missing_packages():
            _bench(self)


def _bench(options: Bench) -> None:
    from mergestream.evaluation.bench import Plan, run_bench, write_report
    from mergestream.evaluation.rows import parse_rows, sweep_rows
    from mergestream.evaluation.suites.loading import open_suite
    from mergestream.evaluation.workers import available_cores, progress_lines
    from mergestream.storage import local_path

    suite = open_suite(options.suite, **arguments_of(open_suite, options))
    on_cluster = options.engine != "local"  # where each further process might start a cluster of its own
    rows = parse_rows(options.methods, trains=suite.can_fine_tune)
    plan = Plan(
        sweep_rows(rows, options.sweep) if options.sweep else rows,
        orders=options.orders,
        seed=options.seed,
        workers=options.workers or (1 if on_cluster else available_cores()),
        last_only=options.last_only or options.sweep is not None,
        engine=make_engine(options.engine, workers=None if on_cluster else 1),
    )
    output = local_path(options.output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"-o {output} is a file; name a directory for the results")
    results = run_bench(suite, plan, output, progress_lines(), command_line())
    files = ["results.json", *write_report(results, output)]
    answer({"output": str(output), "files": files, "summary": results.summary()})
    print_text((output / "table1.md").read_text("utf-8"))
    say(f"written to {output}: {', '.join(files)}")
