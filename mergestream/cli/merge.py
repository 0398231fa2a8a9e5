"""The merge command."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass

from mergestream.cli.options import (
    ComputingOptions,
    DuplicateOptions,
    ExpertOptions,
    MethodOptions,
    OutputOptions,
    RoleOptions,
    add_computing_options,
    add_duplicate_option,
    add_expert_options,
    add_method_options,
    add_output_options,
    add_required_base,
    add_role_options,
    command_line,
)

HELP = "merge experts that are all at hand, in one go"
EXAMPLES = """
mergestream merge --base base --method average expert-1 expert-2 expert-3 -o merged
mergestream merge --base base --method opcm --alpha 0.4 experts/* -o merged
"""


@dataclass(frozen=True)
class Options(MethodOptions, RoleOptions, ExpertOptions, DuplicateOptions, OutputOptions, ComputingOptions):
    experts: list[str]
    base: str


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("experts", nargs="+", metavar="EXPERT")
    add_required_base(parser)
    add_method_options(parser)
    add_role_options(parser)
    add_expert_options(parser)
    add_duplicate_option(parser)
    parser.add_argument("-o", "--out", required=True, metavar="OUT")
    add_output_options(parser)
    add_computing_options(parser, workers="one where each file is read once, else all cores")


def run(options: Options) -> int:
    from mergestream.export.one_shot import merge, usual_workers

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
        allow_duplicate=options.allow_duplicate,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
        engine=options.make_engine(usual_workers(method, len(options.experts))),
        progress=options.make_progress(),
        command=command_line(),
    )
    print(f"{options.out}: {len(options.experts)} experts merged by {options.method}")
    return 0
