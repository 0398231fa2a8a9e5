"""``mergestream from-mergekit``: run a merge recipe that was written for mergekit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mergestream.cli.options import (
    AddingOptions,
    ComputingOptions,
    OutputOptions,
    argument,
    arguments_of,
    at_least,
    command_line,
)
from mergestream.cli.printing import answer, say
from mergestream.sizes import counted

EXAMPLES = """
mergestream from-mergekit recipe.yaml -o merged
mergestream from-mergekit dare.yaml -o merged --seed 7 --dtype bfloat16
"""


@dataclass(frozen=True)
class Options(AddingOptions, OutputOptions, ComputingOptions):
    recipe: str = argument("RECIPE", "a YAML file; its paths are relative to the working directory")
    out: str = argument("-o --out OUT", "the output directory, or s3://BUCKET/PATH", required=True)
    seed: int = argument("--seed N", "random seed of dare (0)", type=at_least(0), default=0)


def run(options: Options) -> None:
    from mergestream.export.one_shot import merge
    from mergestream.export.places import refuse_overlap
    from mergestream.mergekit import read_recipe

    recipe = read_recipe(Path(options.recipe), options.seed)
    refuse_overlap(Path(options.out), options.recipe)
    progress = options.make_progress()
    for note in recipe.notes:
        progress.note(note)
    chosen = {
        "base": recipe.base,
        "experts": [given.source for given in recipe.inputs],
        "method": recipe.method,
        "dtype": options.dtype or recipe.dtype,
    }
    made = {"engine": options.make_engine(), "progress": progress, "command": command_line()}
    merge(**arguments_of(merge, options, **chosen, **made))
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
    say(
        f"{options.out}: {counted(len(recipe.inputs), 'expert')} merged by {recipe.merge_method} as in {options.recipe}"
    )
