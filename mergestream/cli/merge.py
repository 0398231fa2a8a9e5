"""The merge command."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import (
    A_MODEL,
    AddingOptions,
    ComputingOptions,
    MethodOptions,
    OutputOptions,
    argument,
    command_line,
)
from mergestream.cli.printing import answer, say
from mergestream.sizes import counted

HELP = "merge experts that are all at hand, in one go"
EXAMPLES = """
mergestream merge --base base experts/* -o merged
mergestream merge --base base --method average expert-1 expert-2 expert-3 -o merged
mergestream merge --base base --method opcm --alpha 0.4 experts/* -o merged
"""


@dataclass(frozen=True)
class Options(MethodOptions, AddingOptions, OutputOptions, ComputingOptions):
    experts: list[str] = argument(nargs="+", metavar="EXPERT", help=A_MODEL)
    out: str = argument("-o", "--out", required=True, metavar="OUT", help="the directory to be")


def run(options: Options) -> int:
    from mergestream.export.one_shot import merge

    method = options.make_method()
    merge(
        options.base,
        options.experts,
        options.out,
        method,
        linear=options.linear,
        not_linear=options.not_linear,
        partial=options.partial,
        ignore=options.ignore,
        vocab=options.vocab,
        allow_duplicate=options.allow_duplicate,
        allow_other_base=options.allow_other_base,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
        engine=options.make_engine(),
        progress=options.make_progress(),
        command=command_line(),
    )
    answer({"out": options.out, "method": method.name, "parameters": method.parameters, "experts": options.experts})
    say(f"{options.out}: {counted(len(options.experts), 'expert')} merged by {method.name}")
    return 0
