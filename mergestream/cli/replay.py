"""The replay command."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import A_MODEL, ComputingOptions, argument, command_line, repeated, switch
from mergestream.cli.printing import answer, say
from mergestream.errors import UsageError
from mergestream.sizes import counted

HELP = "make an export again by its recipe, from the sources"
EXAMPLES = """
mergestream replay merged/mergestream.json -o again
mergestream replay merged -o again --base path/to/base --source legal=path/to/legal
"""


@dataclass(frozen=True)
class Options(ComputingOptions):
    recipe: str = argument(metavar="RECIPE", help="the mergestream.json of an export, or its directory")
    out: str = argument("-o", "--out", required=True, metavar="OUT", help="the directory to be")
    base: str | None = argument("--base", metavar="MODEL", help=f"where the base is now: {A_MODEL}")
    source: list[str] = repeated("--source", "NAME=PATH", "where an expert is now (its digest is checked)")
    overwrite: bool = switch("--overwrite", "replace an earlier export")

    @property
    def sources(self) -> dict[str, str]:
        sources = {}
        for text in self.source:
            name, equals, place = text.partition("=")
            if not (name and equals and place):
                raise UsageError(f"--source {text} is not of the form NAME=PATH")
            sources[name] = place
        return sources


def run(options: Options) -> int:
    from mergestream.replay import replay

    made, same = replay(
        options.recipe,
        options.out,
        base=options.base,
        sources=options.sources,
        overwrite=options.overwrite,
        engine=options.make_engine(),
        progress=options.make_progress(),
        command=command_line(),
    )
    experts = [expert.name for expert in made.experts]
    answer({"out": options.out, "method": made.method, "experts": experts, "same": same})
    same_text = ", the same to the last bit" if same else ""
    say(f"{options.out}: made again of {counted(len(experts), 'expert')} by {made.method}{same_text}")
    return 0
