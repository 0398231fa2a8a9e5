"""``mergestream merge`` and ``mergestream from-mergekit``: merge experts in one go, without a store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mergestream.cli.options import (
    MODEL,
    AddingOptions,
    MethodOptions,
    OutputOptions,
    RunningOptions,
    argument,
    arguments_of,
    at_least,
    command_line,
)
from mergestream.cli.printing import answer, say
from mergestream.errors import UsageError
from mergestream.sizes import counted


@dataclass(frozen=True)
class Merge(MethodOptions, AddingOptions, OutputOptions, RunningOptions):
    EXAMPLES = """
        mergestream merge --base base experts/* -o merged
        mergestream merge --base base --method average expert-1 expert-2 expert-3 -o merged
        mergestream merge --base base --method opcm --alpha 0.4 experts/* -o merged
        """
    experts: list[str] = argument("EXPERT", MODEL, nargs="+")
    out: str = argument("-o --out OUT", "the output directory, or s3://BUCKET/PATH", required=True)

    def run(self) -> None:
        from mergestream.export.one_shot import merge

        method = self.make_method()
        merge(**arguments_of(merge, self, method=method, command=command_line(), **self.running))
        answer({"out": self.out, "method": method.name, "parameters": method.parameters, "experts": self.experts})
        say(f"{self.out}: {counted(len(self.experts), 'expert')} merged by {method.name}")


@dataclass(frozen=True)
class FromMergekit(AddingOptions, OutputOptions, RunningOptions):
    EXAMPLES = """
        mergestream from-mergekit recipe.yaml merged
        mergestream from-mergekit dare.yaml merged --seed 7 --dtype bfloat16
        """
    recipe: str = argument("RECIPE", "a YAML file; its paths are relative to the working directory")
    out: str | None = argument("OUT", "the output directory, or s3://BUCKET/PATH", nargs="?")
    out_option: str | None = argument("-o --out OUT", "the same as an option")
    seed: int = argument("--seed N", "random seed of dare (0)", type=at_least(0), default=0)

    def run(self) -> None:
        from mergestream.export.one_shot import merge
        from mergestream.export.places import refuse_overlap
        from mergestream.mergekit import read_recipe

        if (out := self.out or self.out_option) is None or (self.out and self.out_option):
            raise UsageError("give one output directory: mergestream from-mergekit RECIPE OUT")
        recipe = read_recipe(Path(self.recipe), self.seed)
        if recipe.layers is not None:
            _check_layers(recipe.base, recipe.layers)
        refuse_overlap(Path(out), self.recipe)
        running = self.running
        for note in recipe.notes:
            running["progress"].note(note)
        sources = [given.source for given in recipe.inputs]
        options = arguments_of(
            merge, self, out=out, dtype=self.dtype or recipe.dtype, command=command_line(), **running
        )
        merge(recipe.base, sources, method=recipe.method, base_is_merged=True, **options)
        answer(
            {
                "out": out,
                "merge_method": recipe.merge_method,
                "method": recipe.method.name,
                "parameters": recipe.method.parameters,
                "base": recipe.base,
                "experts": [vars(given) for given in recipe.inputs],
            }
        )
        say(f"{out}: {counted(len(recipe.inputs), 'model')} merged by {recipe.merge_method} as in {self.recipe}")


def _check_layers(base: str, covered: int) -> None:
    """Refuse slices that do not cover all layers of the base."""
    from mergestream.base.names import layer_of
    from mergestream.checkpoints import open_checkpoint
    from mergestream.mergekit import STACKS

    with open_checkpoint(base) as opened:
        layers = {layer_of(name) for name in opened.tensors}
    stacks = Counter(layer.rpartition(".")[0] for layer in layers if layer[-1].isdecimal())
    if covered != (count := max(stacks.values(), default=0)):
        raise UsageError(f"{STACKS}: the slices end at layer {covered}, and {base} has {count}")
