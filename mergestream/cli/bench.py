"""``mergestream bench``: merge the experts of a suite by several methods and score every task."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mergestream.cli.options import argument, at_least, command_line
from mergestream.cli.printing import answer, print_text, say
from mergestream.errors import UsageError


@dataclass(frozen=True)
class Bench:
    EXAMPLES = """
        mergestream bench my_suite.py --methods ledger,opcm,average --orders 3 -o results
        mergestream bench clip-vit-b-16 --tasks 8 --orders 10 -o results                        # in a checkout
        mergestream bench text --methods opcm:alpha=0.3,opcm:alpha=0.5 --last-only -o results
        """
    suite: str = argument("SUITE", "a suite file (.py), or in a checkout text, vision, …; its code is executed")
    output: str = argument(
        "-o --output DIR",
        "directory for results and tables; results that it already has are kept",
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
    last_only: bool = argument("--last-only", "score only the last model of every order: ACC without BWT, faster")
    test_limit: int | None = argument("--test-limit N", "test samples per task (text, vision: 500)", type=at_least(1))
    workers: int | None = argument("--workers N", "parallel processes (all cores)", type=at_least(1))

    def run(self) -> None:
        from mergestream.evaluation.bench import Plan, progress_lines, run_bench
        from mergestream.evaluation.rows import parse_rows
        from mergestream.evaluation.suites import open_suite
        from mergestream.evaluation.tables import write_tables
        from mergestream.storage import local_path

        suite = open_suite(self.suite, self.tasks, self.test_limit)
        rows = parse_rows(self.methods)
        workers = self.workers or os.cpu_count() or 1
        plan = Plan(rows, self.orders, self.seed, workers, self.last_only)
        output = local_path(self.output)
        if output.exists() and not output.is_dir():
            raise UsageError(f"-o {output} is a file; name a directory for the results")
        results = run_bench(suite, plan, output, progress_lines(), command_line())
        files = ["results.json", *write_tables(results, output)]
        answer({"output": str(output), "files": files, "summary": results.summary()})
        print_text((output / "table1.md").read_text("utf-8"))
        say(f"written to {output}: {', '.join(files)}")
