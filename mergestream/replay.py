"""Replay: make an export again from its recipe, and check the digest of every model.

A recipe may come from anyone. Nothing in it is executed, and its paths are followed only below the current directory
and below the directory of the export; the user must pass all others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial as bind
from pathlib import Path
from typing import NamedTuple

from mergestream.api import Store, draw_pictures
from mergestream.checkpoints.layout import MARKER
from mergestream.checkpoints.location import is_commit
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.engine import Engine, LocalEngine
from mergestream.errors import MergestreamError, UsageError, did_you_mean
from mergestream.export.adapter import write_expert_adapters, write_merged_adapter
from mergestream.export.card import without_dates
from mergestream.export.directory import Output
from mergestream.export.model import write_model
from mergestream.export.one_shot import MergeInputs, merge_in_one_pass
from mergestream.export.recipe import Recipe, read_recipe
from mergestream.methods import make_method
from mergestream.progress import Progress
from mergestream.report.diagnostics import similarity
from mergestream.storage import local_path

BASE = "--base"


class Replayed(NamedTuple):
    """The recipe of a replay, and whether its tensors have the same bits as before."""

    recipe: Recipe
    same: bool


def replay(
    recipe: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    sources: Mapping[str, str] | None = None,
    overwrite: bool = False,
    engine: Engine | None = None,
    progress: Progress | None = None,
    command: str | None = None,
) -> Replayed:
    """Make an export again from its recipe, and write it to ``out``.

    ``base`` and ``sources`` (by expert name) say where models are now, if they have moved. A model that has changed is
    an error; a result with other bits is a note.
    """
    path = Path(recipe) / MARKER if Path(recipe).is_dir() else Path(recipe)
    given, engine, progress = read_recipe(path), engine or LocalEngine(), progress or Progress()
    places = _find_models(given, path, base, sources or {})
    form = given.form
    output = Output(local_path(out), form.dtype, form.max_shard_size or DEFAULT_SHARD_SIZE, overwrite, command)
    output.keep_off(*places.values())
    with output.draft() as draft:
        if given.made_by == "merge":
            _merge_in_one_pass(given, places, draft, output, engine, progress)
        else:
            _add_one_by_one(given, places, draft, output, engine, progress)
    made = read_recipe(output.path / MARKER)
    if made.result != given.result:
        reason = "" if given.exact else "an expert was subtracted from a sum, or "
        progress.note(
            f"{output.path} has other bits than {path}: {reason}another version of torch or another processor rounds "
            "differently"
        )
    return Replayed(made, made.result == given.result)


def _merge_in_one_pass(
    recipe: Recipe, places: Mapping[str, str], draft: Path, output: Output, engine: Engine, progress: Progress
) -> None:
    experts = recipe.experts
    if any(expert.options != experts[0].options for expert in experts):
        raise MergestreamError("the recipe of a one-shot merge has different options for its experts")
    inputs = MergeInputs(
        base=places[BASE],
        experts=[places[expert.name] for expert in experts],
        method=make_method(recipe.method, recipe.parameters),
        linear=recipe.base.linear,
        not_linear=recipe.base.not_linear,
        options=experts[0].options,
        names=[expert.name for expert in experts],
    )
    made = merge_in_one_pass(inputs, draft, output, engine, progress)
    _check_base(recipe, made.base.digest, places)
    for expert, found in zip(experts, made.experts, strict=True):
        _check_digest(found.digest, expert.digest, expert.name, places)


def _add_one_by_one(
    recipe: Recipe, places: Mapping[str, str], draft: Path, output: Output, engine: Engine, progress: Progress
) -> None:
    """Add the experts to a temporary store beside the draft, and export it."""
    store = Store.create(
        draft.with_name("store"),
        places[BASE],
        make_method(recipe.method, recipe.parameters),
        linear=recipe.base.linear,
        not_linear=recipe.base.not_linear,
        heads=recipe.base.heads,
        keep=0,
        max_rank=recipe.max_rank,
        config_only=recipe.base.digest is None,
        engine=engine,
        progress=progress,
    )
    _check_base(recipe, store.manifest.base.digest, places)
    for expert in recipe.experts:
        added = store.absorb(places[expert.name], expert.name, **expert.options)
        _check_digest(added.digest, expert.digest, expert.name, places)
    # Entries of a ledger are cut for the number of experts at the time, some of which may have been removed.
    cuts = {expert.name: expert.cut for expert in recipe.experts}
    history = [dataclasses.replace(entry, cut=max(entry.cut, cuts[entry.name])) for entry in store.history]
    dataclasses.replace(store.manifest, history=tuple(history)).save(store.place)
    with store.snapshot() as snapshot:
        draw = bind(draw_pictures, progress, snapshot.manifest, similarity(snapshot)) if recipe.form.pictures else None
        target = without_dates(snapshot), draft, output, engine, progress
        if recipe.form.format == "loras":
            write_expert_adapters(*target, recipe.form.rank)
        elif recipe.form.format == "lora":
            write_merged_adapter(*target, recipe.readout, recipe.form.rank, draw)
        else:
            write_model(*target, recipe.readout, draw)


def _check_base(recipe: Recipe, digest: str | None, places: Mapping[str, str]) -> None:
    if recipe.base.digest:
        _check_digest(digest, recipe.base.digest, BASE, places)


def _check_digest(found: str | None, expected: str, name: str, places: Mapping[str, str]) -> None:
    if found != expected:
        what, option = ("the base", "--base MODEL") if name == BASE else (name, f"--source {name}=PATH")
        raise MergestreamError(
            f"{places[name]} is not {what} of the recipe, or has changed since: its digest is {found}, and was "
            f"{expected}; pass the right one with {option}"
        )


def _find_models(recipe: Recipe, path: Path, base: str | None, given: Mapping[str, str]) -> dict[str, str]:
    """Where the base and every expert are; one error for all that the user must pass."""
    names = [expert.name for expert in recipe.experts]
    for name in given:
        if name not in names:
            raise UsageError(f"--source {name}: the recipe has no such expert{did_you_mean(name, names)}")
    known = {**given, **({BASE: base} if base else {})}
    wanted = {BASE: recipe.base.source, **{expert.name: expert.source for expert in recipe.experts}}
    places = {name: known.get(name) or _find(source, path) for name, source in wanted.items()}
    missing = [
        f"--base {wanted[name]}" if name == BASE else f"--source {name}={wanted[name]}"
        for name, place in places.items()
        if place is None
    ]
    if missing:
        raise MergestreamError(
            f"{path} names models that do not exist here or lie outside of this directory; say where they are: "
            f"{' '.join(missing)}"
        )
    return {name: place for name, place in places.items() if place is not None}


def _find(source: str, path: Path) -> str | None:
    """A hub id with its commit, or a path below the current directory or below the directory of the export."""
    if is_commit(source):
        return source
    if Path(source).is_absolute() or ".." in Path(source).parts or not source:
        return None
    if Path(source).exists():
        return source
    parent = path.resolve().parent.parent
    found = parent / source
    return str(found) if found.exists() and found.resolve().is_relative_to(parent) else None
