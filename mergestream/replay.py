"""Make an export again by its recipe, from the sources, with every digest checked.

A recipe may come from anybody. Nothing in it is executed, and of places on this machine it is only followed to those
below the directory where the user is, or where the export lies; any other must be named by the user.
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
from mergestream.export.adapter import write_each, write_merged
from mergestream.export.directory import Output
from mergestream.export.model import write_model
from mergestream.export.one_shot import merge
from mergestream.export.provenance import undated
from mergestream.export.recipe import ExpertUsed, Recipe, read_recipe
from mergestream.files import local_path
from mergestream.methods import make_method
from mergestream.progress import Progress

BASE = "--base"


class Replayed(NamedTuple):
    """What was made again, and whether it is the same to the last bit."""

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
    """Make what a recipe says once more, and write it to ``out``.

    ``base`` and ``sources`` (by the names of the experts) say where the models are now, if they are not where the
    recipe has them. What has changed since is refused; what comes out other than it was is told.
    """
    path = Path(recipe) / MARKER if Path(recipe).is_dir() else Path(recipe)
    followed, progress = read_recipe(path), progress or Progress()
    places = _places(followed, path, base, sources or {})
    form = followed.form
    output = Output(local_path(out), form.dtype, form.max_shard_size or DEFAULT_SHARD_SIZE, overwrite, command)
    output.keep_off(*places.values())
    engine = engine or LocalEngine()
    (_merge if followed.made_by == "merge" else _by_steps)(followed, places, output, engine, progress)
    made = read_recipe(output.path / MARKER)
    same = made.result == followed.result
    if not same:
        why = "" if followed.exact else "an expert was subtracted from what it was made of, or "
        progress.note(
            f"{output.path} has not the very bits of {path}: {why}another version of torch or another processor rounds "
            "otherwise"
        )
    return Replayed(made, same)


def _merge(recipe: Recipe, places: Mapping[str, str], output: Output, engine: Engine, progress: Progress) -> None:
    options = [dict(expert.options) for expert in recipe.experts]
    if any(each != options[0] for each in options):
        raise MergestreamError("the recipe has experts with options of their own, which only those of a store have")
    merge(
        places[BASE],
        [places[expert.name] for expert in recipe.experts],
        output.path,
        make_method(recipe.method, recipe.parameters),
        linear=recipe.base.linear,
        not_linear=recipe.base.not_linear,
        **options[0],
        dtype=output.dtype,
        max_shard_size=output.max_shard_size,
        overwrite=output.overwrite,
        engine=engine,
        progress=progress,
        command=output.command,
        names=[expert.name for expert in recipe.experts],
        approve=lambda made: _check_all(recipe, made, places),
    )


def _check_all(recipe: Recipe, made: Recipe, places: Mapping[str, str]) -> None:
    _check_base(recipe, made.base.digest, places)
    for expert, found in zip(recipe.experts, made.experts, strict=True):
        _check(expert, found.digest, places)


def _by_steps(recipe: Recipe, places: Mapping[str, str], output: Output, engine: Engine, progress: Progress) -> None:
    """By a store that is there for as long as it takes."""
    with output.draft() as draft:
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
            _check(expert, store.absorb(places[expert.name], expert.name, **expert.options).digest, places)
        _leave_room(store, recipe)
        _write(store, recipe, draft, output)


def _leave_room(store: Store, recipe: Recipe) -> None:
    """Cut the entries of a ledger as they were cut: others may have come and gone."""
    cuts = {expert.name: expert.cut for expert in recipe.experts}
    history = [dataclasses.replace(entry, cut=max(entry.cut, cuts[entry.name])) for entry in store.history]
    dataclasses.replace(store.manifest, history=tuple(history)).save(store.path)


def _write(store: Store, recipe: Recipe, draft: Path, output: Output) -> None:
    similar = store.similarity() if recipe.form.pictures else None
    draw = bind(draw_pictures, store.progress, store.manifest, similar) if similar else None
    chosen, rank = recipe.readout, recipe.form.rank
    with store.snapshot() as snapshot:
        place = undated(snapshot), draft, output, store.engine, store.progress
        if recipe.form.format == "loras":
            write_each(*place, rank)
        elif recipe.form.format == "lora":
            write_merged(*place, selection=chosen.selection, rank=rank, scale=chosen.scale, illustrate=draw)
        else:
            write_model(*place, selection=chosen.selection, scale=chosen.scale, task=chosen.task, illustrate=draw)


def _check_base(recipe: Recipe, digest: str | None, places: Mapping[str, str]) -> None:
    if recipe.base.digest and digest != recipe.base.digest:
        raise MergestreamError(
            f"{places[BASE]} is not the base of the recipe, or has changed since (the digest is {digest}, and was "
            f"{recipe.base.digest}); say where that one is with --base MODEL"
        )


def _check(expert: ExpertUsed, digest: str, places: Mapping[str, str]) -> None:
    if digest != expert.digest:
        raise MergestreamError(
            f"{places[expert.name]} is not {expert.name} of the recipe, or has changed since (the digest is {digest}, "
            f"and was {expert.digest}); say where that one is with --source {expert.name}=PATH"
        )


def _places(recipe: Recipe, path: Path, base: str | None, given: Mapping[str, str]) -> dict[str, str]:
    """Where the base and every expert is; one sentence for all that the user must name."""
    names = [expert.name for expert in recipe.experts]
    for name in given:
        if name not in names:
            raise UsageError(f"--source {name}: the recipe has no such expert{did_you_mean(name, names)}")
    wanted = {BASE: recipe.base.source, **{expert.name: expert.source for expert in recipe.experts}}
    known = {**given, **({BASE: base} if base else {})}
    places: dict[str, str] = {}
    lacking = []
    for name, source in wanted.items():
        option = f"--base {source}" if name == BASE else f"--source {name}={source}"
        found = known.get(name) or _find(source, path)
        if found is None:
            lacking.append(option)
        else:
            places[name] = found
    if lacking:
        raise MergestreamError(
            f"{path} names what is not here, or lies outside of this directory; say where it is: {' '.join(lacking)}"
        )
    return places


def _find(source: str, path: Path) -> str | None:
    """A hub id with its commit, or what lies below the current directory, or below the one where the export is."""
    if is_commit(source):
        return source
    if Path(source).is_absolute() or ".." in Path(source).parts or not source:
        return None
    if Path(source).exists():
        return source
    around = path.resolve().parent.parent
    found = around / source
    return str(found) if found.exists() and found.resolve().is_relative_to(around) else None
