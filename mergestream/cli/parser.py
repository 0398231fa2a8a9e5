"""All commands and their options; what a command does is imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module

from mergestream import __version__
from mergestream.cli import bench
from mergestream.cli.options import at_least, size
from mergestream.errors import UsageError

DESCRIPTION = """\
Merge fine-tuned models into one model as they arrive.

A store keeps the merged state of all models absorbed so far, at a size that does not grow:

  mergestream init store --base path/to/base
  mergestream add store expert-1 expert-2
  mergestream export store merged
"""


class Parser(argparse.ArgumentParser):
    """Prints wrong usage like every other error, with exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(UsageError.exit_code, f"error: {message} (see: {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="mergestream", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"mergestream {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, help: str, examples: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(
            name,
            help=help,
            description=help[0].upper() + help[1:] + ".",
            epilog="examples:\n" + "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        return added

    init = command(
        "init",
        "make an empty store for a base model",
        """
        mergestream init store --base path/to/base
        mergestream init store --base org/model@main --method ties --set density=0.1 --set mode=streaming
        mergestream init store --base bert --heads 'classifier.*' --not-linear '*.pooler.*'
        mergestream init store --base org/model --config-only --max-rank 64    (adapters only)
        """,
    )
    init.add_argument("store", metavar="STORE")
    init.add_argument("--base", required=True, metavar="MODEL", help="directory, file, or hub id org/name[@revision]")
    _method_options(init)
    _role_options(init)
    init.add_argument("--keep", type=int, default=1, metavar="N", help="earlier steps kept for undo (1)")
    init.add_argument(
        "--config-only", action="store_true", help="fetch and read the base's weights only when they are needed"
    )
    init.add_argument(
        "--max-rank", type=at_least(1), metavar="K", help="bound the rank of what adapters add up to (exact without)"
    )
    _running_options(init, device=False)
    init.set_defaults(run=_lazy("mergestream.cli.store", "init"))

    add = command(
        "add",
        "absorb experts, in the given order, each as a step of its own",
        """
        mergestream add store path/to/expert
        mergestream add store experts/* --workers 4 --max-memory 8GB
        mergestream add store path/to/expert --dry-run
        mergestream add store path/to/expert --gate 'kept>=0.6' --gate 'max_cosine<=0.5'
        mergestream add store path/to/expert --evaluate 'python score.py {model}' --gate 'score>=0.8'
        """,
    )
    add.add_argument("store", metavar="STORE")
    add.add_argument("experts", nargs="+", metavar="EXPERT", help="directory, file, or hub id org/name[@revision]")
    add.add_argument("--name", help="how to call the expert (the last part of its path)")
    _expert_options(add)
    _duplicate_option(add)
    add.add_argument("--dry-run", action="store_true", help="tell what would happen, change nothing (as inspect)")
    add.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="CONDITION",
        help="refuse an expert that fails it; on kept, max_cosine, relative_norm, norm, lambda, distance or score",
    )
    add.add_argument(
        "--evaluate",
        metavar="CMD",
        help="run this on the merged model before it counts, with {model} for its directory; "
        "score is the last number it prints",
    )
    add.add_argument("--json", action="store_true", help="print what was absorbed as JSON")
    _base_option(add)
    _running_options(add)
    add.set_defaults(run=_lazy("mergestream.cli.store", "add"))

    inspect = command(
        "inspect",
        "tell what adding an expert would do; changes nothing",
        """
        mergestream inspect store path/to/expert
        mergestream inspect store path/to/expert --json
        """,
    )
    inspect.add_argument("store", metavar="STORE")
    inspect.add_argument("expert", metavar="EXPERT")
    _expert_options(inspect)
    inspect.add_argument("--json", action="store_true", help="all facts, as one JSON object")
    _base_option(inspect)
    _running_options(inspect)
    inspect.set_defaults(run=_lazy("mergestream.cli.store", "inspect"))

    status = command(
        "status",
        "show what a store holds, and what each tensor is",
        """
        mergestream status store
        mergestream status store --tensors
        mergestream status store --json
        """,
    )
    status.add_argument("store", metavar="STORE")
    status.add_argument("--tensors", action="store_true", help="list every tensor with its role and rule")
    status.add_argument("--json", action="store_true", help="one JSON object")
    status.set_defaults(run=_lazy("mergestream.cli.store", "status"))

    log = command("log", "list the absorbed experts", "mergestream log store --json")
    log.add_argument("store", metavar="STORE")
    log.add_argument("--json", action="store_true", help="a JSON list, one object per expert")
    log.set_defaults(run=_lazy("mergestream.cli.store", "log"))

    verify = command("verify", "recompute every digest of a store and its base", "mergestream verify store")
    verify.add_argument("store", metavar="STORE")
    _base_option(verify)
    _running_options(verify, device=False)
    verify.set_defaults(run=_lazy("mergestream.cli.store", "verify"))

    undo = command("undo", "go back to before the last expert", "mergestream undo store")
    undo.add_argument("store", metavar="STORE")
    undo.set_defaults(run=_lazy("mergestream.cli.store", "undo"))

    report = command(
        "report",
        "write a page with the figures and facts of a store",
        """
        mergestream report store -o report.html
        mergestream report store --format md
        mergestream report store -o report.json
        """,
    )
    report.add_argument("store", metavar="STORE")
    report.add_argument("-o", "--out", metavar="FILE", help="where to (md and json: standard output)")
    report.add_argument("--format", choices=("html", "md", "json"), help="what to write (by FILE's ending, or html)")
    report.set_defaults(run=_lazy("mergestream.report.command", "report"))

    diff = command(
        "diff",
        "compare two steps of a store, or a step and a checkpoint",
        """
        mergestream diff store 3 4
        mergestream diff store 0 4
        mergestream diff store 4 path/to/expert
        """,
    )
    diff.add_argument("store", metavar="STORE")
    for side in ("A", "B"):
        diff.add_argument(side.lower(), metavar=side, help="number of a step (0 is the base), or a checkpoint")
    diff.add_argument("--json", action="store_true", help="one JSON object, with every layer and tensor")
    _base_option(diff)
    _running_options(diff, device=False)
    diff.set_defaults(run=_lazy("mergestream.report.command", "diff"))

    export = command(
        "export",
        "write the merged model as a directory that from_pretrained loads",
        """
        mergestream export store merged
        mergestream export store merged --dtype bfloat16 --max-shard-size 2GB --overwrite
        mergestream export store merged-for-spam --task spam
        mergestream export store merged-adapter --format lora --rank 32
        """,
    )
    export.add_argument("store", metavar="STORE")
    export.add_argument("out", metavar="OUT")
    export.add_argument("--task", metavar="NAME", help="with the head of this expert")
    export.add_argument("--format", choices=("full", "lora"), default="full", help="a model, or a PEFT adapter (full)")
    export.add_argument("--rank", type=at_least(1), metavar="K", help="the adapter's rank (exact without)")
    _output_options(export)
    _base_option(export)
    _running_options(export, device=False)
    export.set_defaults(run=_lazy("mergestream.cli.output", "export"))

    merge = command(
        "merge",
        "merge experts that are all at hand, in one go",
        """
        mergestream merge --base base --method average expert-1 expert-2 expert-3 -o merged
        mergestream merge --base base --method opcm --alpha 0.4 experts/* -o merged
        """,
    )
    merge.add_argument("experts", nargs="+", metavar="EXPERT")
    merge.add_argument("--base", required=True, metavar="MODEL", help="directory, file, or hub id org/name[@revision]")
    _method_options(merge)
    _role_options(merge, heads=False)
    _expert_options(merge)
    _duplicate_option(merge)
    merge.add_argument("-o", "--out", required=True, metavar="OUT")
    _output_options(merge)
    _running_options(merge, workers="one where each file is read once, else all cores")
    merge.set_defaults(run=_lazy("mergestream.cli.output", "merge"))

    watch = command(
        "watch",
        "absorb experts as they appear in a directory, until interrupted",
        "mergestream watch store incoming/",
    )
    watch.add_argument("store", metavar="STORE")
    watch.add_argument("directory", metavar="DIR", help="each file or directory in it is an expert")
    watch.add_argument("--interval", type=float, default=10, metavar="SECONDS", help="between two looks (10)")
    _base_option(watch)
    _running_options(watch)
    watch.set_defaults(run=_lazy("mergestream.cli.watch", "watch"))

    benched = command("bench", bench.HELP, bench.EXAMPLES)
    bench.add_arguments(benched)
    benched.set_defaults(run=_bench)

    methods = command("methods", "list the methods and their parameters", "mergestream methods")
    methods.add_argument("--json", action="store_true", help="as JSON")
    methods.set_defaults(run=_lazy("mergestream.cli.methods", "methods"))
    return parser


def _bench(arguments: argparse.Namespace) -> int:
    return bench.run(bench.Options(**{field.name: getattr(arguments, field.name) for field in fields(bench.Options)}))


def _lazy(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        code: int = getattr(import_module(module), function)(arguments)
        return code

    return run


def _method_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method", default="opcm", metavar="M", help="opcm, average, …: see mergestream methods (opcm)"
    )
    parser.add_argument("--alpha", type=float, help="OPCM's projection threshold, the same as --set alpha=…")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="parameters", help="a parameter of the method"
    )


def _role_options(parser: argparse.ArgumentParser, heads: bool = True) -> None:
    add = parser.add_argument
    add("--linear", action="append", default=[], metavar="GLOB", help="tensors to treat as linear weights")
    add("--not-linear", action="append", default=[], metavar="GLOB", help="tensors not to treat as linear weights")
    if heads:
        add("--heads", action="append", default=[], metavar="GLOB", help="tensors kept per expert, not merged")


def _expert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--partial", action="store_true", help="tensors missing from an expert count as unchanged")
    parser.add_argument("--ignore", action="append", default=[], metavar="GLOB", help="leave these tensors out")


def _duplicate_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-duplicate", action="store_true", help="also one that was absorbed already, or the base itself"
    )


def _base_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base", metavar="MODEL", help="where the base is now, if it has moved (its digest is checked)"
    )


def _output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", help="float32, float16, bfloat16 or float64 (the base's own)")
    parser.add_argument("--max-shard-size", type=size, default="5GB", metavar="SIZE", help="size of a file (5GB)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing directory")


def _running_options(parser: argparse.ArgumentParser, device: bool = True, workers: str = "all cores") -> None:
    parser.add_argument("--workers", type=at_least(1), metavar="N", help=f"tensors worked on at a time ({workers})")
    if device:
        parser.add_argument("--max-memory", type=size, metavar="SIZE", help="budget for tensors in RAM, such as 4GB")
        parser.add_argument("--device", default="cpu", help="where the arithmetic runs: cpu, cuda or cuda:N (cpu)")
        parser.add_argument("--engine", choices=("local",), default="local", help="who runs the work (local)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars and no notes")
