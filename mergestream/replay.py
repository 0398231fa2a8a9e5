"""Replay: make an export again from its recipe, and check the digest of every model.

A recipe may come from anyone. Nothing in it is executed, and its paths are followed only below the current directory
and below the directory of the export; the user must pass all others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mergestream.checkpoints.layout import MARKER
from mergestream.checkpoints.location import is_commit
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.engine import Engine, LocalEngine
from mergestream.errors import MergestreamError, UsageError, did_you_mean
from mergestream.export.adapter import write_expert_adapters, write_merged_adapter
from mergestream.export.card import without_dates
from mergestream.export.directory import Output
from mergestream.export.model import Target, write_model
from mergestream.export.one_shot import MergeExpert, MergeInputs, merge_in_one_pass, temporary_store
from mergestream.export.recipe import Recipe, read_recipe
from mergestream.methods import make_method
from mergestream.progress import Progress
from mergestream.report.pictures import picture_drawer
from mergestream.storage import local_path
from mergestream.store.store import Store

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
    given, progress = read_recipe(path), progress or Progress()
    places = _find_models(given, path, base, sources or {})
    form = given.form
    output = Output(local_path(out), form.dtype, form.max_shard_size or DEFAULT_SHARD_SIZE, overwrite, command)
    output.keep_off(*places.values())
    inputs = MergeInputs(
        base=places[BASE],
        experts=[MergeExpert(places[expert.name], expert.options, expert.name) for expert in given.experts],
        method=make_method(given.method, given.parameters),
        linear=given.base.linear,
        not_linear=given.base.not_linear,
        heads=given.base.heads,
        max_rank=given.max_rank,
        config_only=given.base.digest is None,
    )
    with output.draft() as draft:
        target = Target(draft, output, engine or LocalEngine(), progress)
        if given.made_by == "merge":
            merge_in_one_pass(inputs, target)
        else:
            _export_again(given, temporary_store(inputs, target), target)
        made = read_recipe(draft / MARKER)
        _check_digests(given, made, places)
    if made.result != given.result:
        reason = "" if given.exact else "an expert was subtracted from a sum, or "
        progress.note(
            f"{output.path} has other bits than {path}: {reason}another version of torch or another processor rounds "
            "differently"
        )
    return Replayed(made, made.result == given.result)


def _export_again(recipe: Recipe, store: Store, target: Target) -> None:
    """Export a temporary store in the form of the recipe."""
    # Entries of a ledger are cut for the number of experts at the time, some of which may have been removed.
    cuts = {expert.name: expert.cut for expert in recipe.experts}
    history = [dataclasses.replace(entry, cut=max(entry.cut, cuts[entry.name])) for entry in store.history]
    dataclasses.replace(store.manifest, history=tuple(history)).save(store.storage)
    with store.snapshot() as snapshot:
        draw = None
        if recipe.form.pictures:
            draw = picture_drawer(target.progress)(snapshot)
        snapshot = without_dates(snapshot)
        if recipe.form.format == "loras":
            write_expert_adapters(snapshot, target, recipe.form.rank)
        elif recipe.form.format == "lora":
            write_merged_adapter(snapshot, target, recipe.readout, recipe.form.rank, draw)
        else:
            write_model(snapshot, target, recipe.readout, draw)


def _check_digests(recipe: Recipe, made: Recipe, places: Mapping[str, str]) -> None:
    """Refuse a base or an expert that is not the one of the recipe."""
    expected = {BASE: recipe.base.digest, **{expert.name: expert.digest for expert in recipe.experts}}
    found = {BASE: made.base.digest, **{expert.name: expert.digest for expert in made.experts}}
    for name, digest in expected.items():
        if digest not in (None, found[name]):
            what, option = ("the base", "--base MODEL") if name == BASE else (name, f"--source {name}=PATH")
            raise MergestreamError(
                f"{places[name]} is not {what} of the recipe, or has changed since: its digest is {found[name]}, and "
                f"was {digest}; pass the right one with {option}"
            )


def _find_models(recipe: Recipe, path: Path, base: str | None, given: Mapping[str, str]) -> dict[str, str]:
    """Where the base and every expert are; one error for all that the user must pass."""
    names = [expert.name for expert in recipe.experts]
    for name in given:
        if name not in names:
            raise UsageError(f"--source {name}: the recipe has no such expert{did_you_mean(name, names)}")
    wanted = {BASE: recipe.base.source, **{expert.name: expert.source for expert in recipe.experts}}
    known = {**given, **({BASE: base} if base else {})}
    places, missing = {}, []
    for name, source in wanted.items():
        if place := known.get(name) or _find(source, path):
            places[name] = place
        else:
            missing.append(f"--base {source}" if name == BASE else f"--source {name}={source}")
    if missing:
        raise MergestreamError(
            f"{path} names models that do not exist here or lie outside of this directory; say where they are: "
            f"{' '.join(missing)}"
        )
    return places


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
