"""``mergestream.json`` beside an export: what it was made of and how, so that it can be made again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, convert

from mergestream.checkpoints.location import shown
from mergestream.errors import MergestreamError
from mergestream.files import read_json
from mergestream.ledger.selection import Selection
from mergestream.schema import Count, Number, Plain
from mergestream.store.manifest import Expert, Options
from mergestream.store.snapshot import Snapshot

FORMAT = 1
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Format = Literal["full", "lora", "loras"]


@dataclass(frozen=True)
class BaseUsed:
    """The base, and how its tensors were sorted."""

    source: str
    digest: Digest | None
    """None where its weights were never read"""
    linear: tuple[str, ...] = ()
    not_linear: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExpertUsed:
    """One expert, and what it was added with."""

    name: str
    source: str
    digest: Digest
    options: Mapping[str, Any] = field(default_factory=dict)
    cut: Count = 0
    """In a ledger: how many experts its entry leaves room for"""


@dataclass(frozen=True)
class Readout:
    """What was chosen when the model was read out."""

    readout: str | None = None
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    balance: bool = False
    scale: str | float | None = None
    task: str | None = None

    @property
    def selection(self) -> Selection:
        return Selection(self.readout, self.only, self.without, self.weights, self.balance)


@dataclass(frozen=True)
class Form:
    """How it was written."""

    format: Format = "full"
    rank: Number | None = None
    dtype: str | None = None
    max_shard_size: Number | None = None
    pictures: bool = False


@dataclass(frozen=True)
class Recipe:
    """All that it takes to make an export again."""

    made_by: Literal["store", "merge"]
    """Step by step, or each tensor carried through all experts at once"""
    base: BaseUsed
    method: str
    parameters: Mapping[str, Plain]
    experts: tuple[ExpertUsed, ...]
    form: Form
    result: Digest
    """Of the tensors that were written"""
    readout: Readout = field(default_factory=Readout)
    max_rank: Number | None = None
    exact: bool = True
    """Whether the same bytes come again; not where an expert was subtracted from a sum, which rounds"""

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        form: Form,
        result: str,
        selection: Selection | None = None,
        scale: str | float | None = None,
        task: str | None = None,
    ) -> Recipe:
        """Of what is read out of a store."""
        manifest, chosen = snapshot.manifest, selection or Selection()
        base = manifest.base
        globs = base.linear, base.not_linear, base.heads
        return cls(
            made_by="store",
            base=BaseUsed(shown(base.source, base.given), base.digest if base.measured else None, *globs),
            method=manifest.method,
            parameters=manifest.parameters,
            max_rank=manifest.max_rank,
            experts=tuple(map(_expert, manifest.history)),
            readout=Readout(**{**dataclasses.asdict(chosen), "scale": scale, "task": task}),
            form=form,
            exact=manifest.is_ledger or [entry.number for entry in manifest.history] == [*range(1, manifest.step + 1)],
            result=result,
        )

    def to_json(self) -> dict[str, Any]:
        return {"recipe": FORMAT, **dataclasses.asdict(self)}


def _expert(entry: Expert) -> ExpertUsed:
    return ExpertUsed(entry.name, shown(entry.source, entry.given), entry.digest, entry.options, entry.cut)


def read_recipe(path: Path) -> Recipe:
    """What a file says, held against the types; it may come from anybody."""
    data = read_json(path, finite=True)
    if "recipe" not in data:
        raise MergestreamError(
            f"{path} is no recipe: give the mergestream.json of an export of this version or a later one"
        )
    if data["recipe"] != FORMAT:
        raise MergestreamError(f"{path} is a recipe of format {data['recipe']!r}; upgrade mergestream to follow it")
    try:
        recipe = convert(data, Recipe)
        for expert in recipe.experts:
            _check_options(expert)
    except ValueError as error:
        raise MergestreamError(f"{path} is no recipe that can be followed: {error}") from error
    names = [expert.name for expert in recipe.experts]
    if not names or len(set(names)) < len(names):
        raise MergestreamError(f"{path} is no recipe that can be followed: every expert needs a name of its own")
    return recipe


def _check_options(expert: ExpertUsed) -> None:
    """An option that is not known would be left out in silence."""
    if unknown := expert.options.keys() - Options.__annotations__.keys():
        raise ValueError(
            f"{expert.name} was added with {min(unknown)}, which this version of mergestream does not know"
        )
    convert(expert.options, Options)
