"""``mergestream replay``: repeat an export from its recipe and its sources."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import MODEL, ComputingOptions, argument, command_line, pair, repeated, switch
from mergestream.cli.printing import answer, say
from mergestream.sizes import counted

EXAMPLES = """
mergestream replay merged/mergestream.json -o again
mergestream replay merged -o again --base path/to/base --source legal=path/to/legal
"""


@dataclass(frozen=True)
class Options(ComputingOptions):
    recipe: str = argument(metavar="RECIPE", help="the mergestream.json of an export, or its directory")
    out: str = argument("-o", "--out", required=True, metavar="OUT", help="the output directory")
    base: str | None = argument("--base", metavar="MODEL", help=f"new location of the base: {MODEL}")
    source: list[tuple[str, str]] = repeated(
        "--source", "NAME=PATH", "new location of an expert (its digest is checked)", type=pair
    )
    overwrite: bool = switch("--overwrite", "replace an earlier export")


def run(options: Options) -> None:
    from mergestream.replay import replay

    made, same = replay(
        options.recipe,
        options.out,
        base=options.base,
        sources=dict(options.source),
        overwrite=options.overwrite,
        engine=options.make_engine(),
        progress=options.make_progress(),
        command=command_line(),
    )
    experts = [expert.name for expert in made.experts]
    answer({"out": options.out, "method": made.method, "experts": experts, "same": same})
    identical = ", bit-identical to the original" if same else ""
    say(f"{options.out}: {counted(len(experts), 'expert')} merged again by {made.method}{identical}")
