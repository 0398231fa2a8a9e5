"""``mergestream merge``: merge experts in one go, without a store."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import (
    MODEL,
    AddingOptions,
    ComputingOptions,
    MethodOptions,
    OutputOptions,
    argument,
    arguments_of,
    command_line,
)
from mergestream.cli.printing import answer, say
from mergestream.sizes import counted

EXAMPLES = """
mergestream merge --base base experts/* -o merged
mergestream merge --base base --method average expert-1 expert-2 expert-3 -o merged
mergestream merge --base base --method opcm --alpha 0.4 experts/* -o merged
"""


@dataclass(frozen=True)
class Options(MethodOptions, AddingOptions, OutputOptions, ComputingOptions):
    experts: list[str] = argument("EXPERT", MODEL, nargs="+")
    out: str = argument("-o --out OUT", "the output directory, or s3://BUCKET/PATH", required=True)


def run(options: Options) -> None:
    from mergestream.export.one_shot import merge

    method = options.make_method()
    engine, progress = options.make_engine(), options.make_progress()
    made = {"method": method, "engine": engine, "progress": progress, "command": command_line()}
    merge(**arguments_of(merge, options, **made))
    answer({"out": options.out, "method": method.name, "parameters": method.parameters, "experts": options.experts})
    say(f"{options.out}: {counted(len(options.experts), 'expert')} merged by {method.name}")
