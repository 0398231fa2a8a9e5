"""The from-mergekit command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mergestream.cli.options import (
    AddingOptions,
    ComputingOptions,
    OutputOptions,
    argument,
    at_least,
    command_line,
)
from mergestream.cli.printing import answer, say
from mergestream.sizes import counted

HELP = "run a recipe that was written for mergekit"
EXAMPLES = """
mergestream from-mergekit recipe.yaml -o merged
mergestream from-mergekit dare.yaml -o merged --seed 7 --dtype bfloat16
"""


@dataclass(frozen=True)
class Options(AddingOptions, OutputOptions, ComputingOptions):
    recipe: str = argument(metavar="RECIPE", help="a YAML file; paths in it are looked for from the working directory")
    out: str = argument("-o", "--out", required=True, metavar="OUT", help="the directory to be")
    seed: int = argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="of the entries that dare drops at random (0)"
    )


def run(options: Options) -> int:
    from mergestream.export.one_shot import merge
    from mergestream.export.places import refuse_around
    from mergestream.mergekit import read_recipe

    recipe = read_recipe(Path(options.recipe), options.seed)
    refuse_around(Path(options.out), options.recipe)
    progress = options.make_progress()
    for note in recipe.notes:
        progress.note(note)
    merge(
        recipe.base,
        [given.source for given in recipe.inputs],
        options.out,
        recipe.method,
        partial=options.partial,
        ignore=options.ignore,
        allow_duplicate=options.allow_duplicate,
        allow_other_base=options.allow_other_base,
        dtype=options.dtype or recipe.dtype,
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
        engine=options.make_engine(),
        progress=progress,
        command=command_line(),
    )
    answer(
        {
            "out": options.out,
            "merge_method": recipe.merge_method,
            "method": recipe.method.name,
            "parameters": recipe.method.parameters,
            "base": recipe.base,
            "experts": [vars(given) for given in recipe.inputs],
        }
    )
    experts = counted(len(recipe.inputs), "expert")
    say(f"{options.out}: {experts} merged by {recipe.merge_method}, as {options.recipe} says")
    return 0
