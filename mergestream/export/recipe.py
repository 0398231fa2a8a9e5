"""The recipe in ``mergestream.json``: what an export was made from, so that `replay` can make it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, convert

from mergestream.checkpoints.location import public_name
from mergestream.errors import MergestreamError
from mergestream.files import read_json
from mergestream.ledger.selection import Selection
from mergestream.schema import Count, Number, Plain
from mergestream.store.manifest import Manifest, Options

FORMAT = 1
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


@dataclass(frozen=True)
class RecipeBase:
    """The base, and the globs that classified its tensors."""

    source: str
    digest: Digest | None
    """None if its weights were never read"""
    linear: tuple[str, ...] = ()
    not_linear: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecipeExpert:
    """One expert, and the options it was added with."""

    name: str
    source: str
    digest: Digest
    options: Options = field(default_factory=Options)
    cut: Count = 0
    """In a ledger: its entry was cut as if so many experts shared the budget"""


@dataclass(frozen=True)
class ReadoutChoice(Selection):
    """How the model was read out."""

    scale: str | float | None = None
    task: str | None = None


@dataclass(frozen=True)
class Form:
    """The format of the files."""

    format: Literal["full", "lora", "loras"] = "full"
    rank: Number | None = None
    dtype: str | None = None
    max_shard_size: Number | None = None
    pictures: bool = False


@dataclass(frozen=True)
class Recipe:
    """Everything that is needed to make an export again."""

    made_by: Literal["store", "merge"]
    """``store``: experts were added one by one; ``merge``: each tensor was merged in one pass over all experts"""
    base: RecipeBase
    method: str
    parameters: Mapping[str, Plain]
    experts: tuple[RecipeExpert, ...]
    form: Form
    result: Digest
    """Digest of the written tensors"""
    readout: ReadoutChoice = field(default_factory=ReadoutChoice)
    max_rank: Number | None = None
    exact: bool = True
    """False if an expert was subtracted from a sum: that rounds, so that a replay gives other bits"""

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        form: Form,
        result: str,
        *,
        readout: ReadoutChoice | None = None,
        made_by: Literal["store", "merge"] = "store",
    ) -> Recipe:
        """The recipe of an export of a store with this manifest."""
        base, history = manifest.base, manifest.history
        digest = base.digest if base.measured else None
        return cls(
            made_by=made_by,
            base=RecipeBase(public_name(base.source, base.given), digest, base.linear, base.not_linear, base.heads),
            method=manifest.method,
            parameters=manifest.parameters,
            experts=tuple(
                RecipeExpert(entry.name, public_name(entry.source, entry.given), entry.digest, entry.options, entry.cut)
                for entry in history
            ),
            form=form,
            result=result,
            readout=readout or ReadoutChoice(),
            max_rank=manifest.max_rank,
            exact=bool(manifest.entries) or [entry.number for entry in history] == [*range(1, len(history) + 1)],
        )

    def to_json(self) -> dict[str, Any]:
        """The keys of ``mergestream.json`` that `read_recipe` reads."""
        return {"recipe": FORMAT, **dataclasses.asdict(self)}


def read_recipe(path: Path) -> Recipe:
    """Read and validate a recipe; the file is untrusted."""
    data = read_json(path, finite=True)
    if "recipe" not in data:
        raise MergestreamError(f"{path} is not a recipe; pass the mergestream.json of an export")
    if data["recipe"] != FORMAT:
        raise MergestreamError(f"{path} is a recipe of format {data['recipe']!r}; upgrade mergestream to replay it")
    try:
        recipe = convert(data, Recipe)
    except ValueError as error:
        raise MergestreamError(f"{path} is not a valid recipe: {error}") from error
    for expert in data["experts"]:
        if unknown := expert.get("options", {}).keys() - Options.__annotations__.keys():
            raise MergestreamError(
                f"{path}: {expert['name']} was added with {min(unknown)}, which this version of mergestream does not "
                "know; upgrade mergestream to replay it"
            )
    names = {expert.name for expert in recipe.experts}
    if not names or len(names) < len(recipe.experts):
        raise MergestreamError(f"{path} is not a valid recipe: every expert needs a unique name")
    return recipe
