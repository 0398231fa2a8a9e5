"""A merged model as a directory that ``from_pretrained`` loads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mergestream.checkpoints import FLOATS, Checkpoint, SafetensorsWriter, TensorSpec, torch_dtype
from mergestream.checkpoints.layout import CARD, DIFFUSERS_STEM, MODULES, model_config, module_folders
from mergestream.checkpoints.location import without_revision
from mergestream.digest import TensorHasher, combined_digest
from mergestream.engine import Engine
from mergestream.experts.vocabulary import Token
from mergestream.export.card import CardFacts, model_card
from mergestream.export.directory import Output
from mergestream.export.labels import labels
from mergestream.export.recipe import Form, Recipe
from mergestream.export.source import Source, StateSource
from mergestream.export.vocabulary import GrownSource, config_for, spoken
from mergestream.files import read_json
from mergestream.ledger.selection import Selection
from mergestream.progress import Progress
from mergestream.store.snapshot import Snapshot

Illustrate = Callable[[Path], Mapping[str, str]]
"""Draws pictures for the card into a directory; returns the files and what they show, in words."""


def export_model(snapshot: Snapshot, output: Output, engine: Engine, progress: Progress, **choices: Any) -> None:
    """`write_model` to a directory that is replaced whole, or not at all."""
    with output.draft() as draft:
        write_model(snapshot, draft, output, engine, progress, **choices)


def write_model(
    snapshot: Snapshot,
    draft: Path,
    output: Output,
    engine: Engine,
    progress: Progress,
    *,
    selection: Selection | None = None,
    scale: str | float | None = None,
    task: str | None = None,
    illustrate: Illustrate | None = None,
) -> None:
    """Write ``merged = θ⁰ + scale · direction``; ``task`` names the expert whose head to put in place."""
    with ExitStack() as stack:
        manifest, reading = snapshot.manifest, snapshot.reading(engine, selection, progress)
        base = stack.enter_context(manifest.open_base())
        found = snapshot.open_task(task) if task is not None else None
        if found:
            stack.enter_context(found.heads)
            if found.config is None:
                progress.note(f"{task} came without a config.json: the base's is written, which may have other labels")
        factor = reading.scale(scale, engine)
        source = StateSource(reading, base, factor, found)
        speakers = spoken(snapshot, reading, task, stack, progress)
        grown = GrownSource(source, list(speakers.values()), base) if speakers else None
        result = write_tensors(grown or source, draft, output, engine, progress)
        pictures = illustrate(draft) if illustrate else {}
        card = CardFacts.of(snapshot, reading, factor, source.distance, task, output.command, pictures)
        own = speakers[task].tokens if task in speakers else ()
        write_companions(draft, output, base, card, found.config if found else None, grown, own)
        form = Form(dtype=output.dtype, max_shard_size=output.max_shard_size, pictures=bool(illustrate))
        output.mark(draft, Recipe.of(snapshot, form, result, selection, scale, task).to_json())


def write_tensors(source: Source | GrownSource, draft: Path, output: Output, engine: Engine, progress: Progress) -> str:
    """Stream every tensor to its place, several at a time; returns the digest of them all."""
    dtype = FLOATS.get(output.dtype or "")
    layout = {name: written_form(form, dtype) for name, form in source.forms.items()}

    def write(name: str) -> str:
        hasher = TensorHasher(torch_dtype(layout[name].dtype), layout[name].shape)
        for start, piece in source.pieces(name, layout[name].dtype):
            writer.write_piece(name, start, piece)
            hasher.update(piece)
        return hasher.hexdigest()

    costs, digests = {name: spec.nbytes for name, spec in layout.items()}, {}
    with (
        SafetensorsWriter(draft, layout, prefix=_stem(source.base), max_shard_size=output.max_shard_size) as writer,
        progress.task(f"writing {output.path.name}", sum(costs.values())) as advance,
    ):
        for name, digests[name] in engine.run(costs, write, source.memory):
            advance(costs[name])
    return combined_digest(digests)


def _stem(base: Checkpoint) -> str:
    """What the library that loads the base calls its weights."""
    is_of_diffusers = all(info.file.startswith(DIFFUSERS_STEM) for info in base.tensors.values())
    return DIFFUSERS_STEM if is_of_diffusers else "model"


def written_form(form: TensorSpec, dtype: str | None) -> TensorSpec:
    """In another type where one is given; integers stay what they are."""
    return TensorSpec(dtype if dtype and form.is_float else form.dtype, form.shape)


def write_companions(
    draft: Path,
    output: Output,
    base: Checkpoint,
    card: CardFacts,
    config: Mapping[str, Any] | None = None,
    grown: GrownSource | None = None,
    own: Sequence[Token] = (),
) -> None:
    """Copy config, tokenizer and generation files from the base, and write the model card.

    ``config`` is that of the expert whose head is put in place, with labels, and perhaps tokens, of its ``own``;
    ``grown`` tables have tokens that the base's tokenizer has not.
    """
    of_other_class = config is not None and config.get("architectures") != model_config(base.directory).get(
        "architectures"
    )
    if base.directory is not None:
        # What makes an encoder of sentences of the base does not go with a classifier.
        left_out = {MODULES, *module_folders(base.directory)} if of_other_class else set()
        for path in base.companions():
            copy = draft / path.relative_to(base.directory)
            if copy.relative_to(draft).parts[0] in left_out:
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    if config is not None or output.dtype is not None or grown:
        _put_config(draft / "config.json", config, output.dtype, grown, own)
    if grown:
        grown.extend_tokenizer(draft)
    (draft / CARD).write_text(model_card(card, _hub_id(base), *labels(base, of_other_class)), encoding="utf-8")


_DTYPE_KEYS = {"dtype", "torch_dtype"}


def _put_config(
    path: Path,
    theirs: Mapping[str, Any] | None,
    dtype: str | None,
    grown: GrownSource | None,
    own: Sequence[Token],
) -> None:
    """Put an expert's config in place of the base's, where there is one. ``from_pretrained`` is to load the type that
    was written, the base's or ``dtype``, and as many tokens."""
    ours = read_json(path) if path.is_file() else {}
    types = {key: dtype or ours[key] for key in sorted(_DTYPE_KEYS & ours.keys())}
    config = config_for(ours if theirs is None else theirs, ours, grown, own)
    if theirs is not None:
        config = {key: value for key, value in config.items() if key not in _DTYPE_KEYS}
    if path.is_file() or theirs is not None:
        path.write_text(json.dumps(config | types, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _hub_id(base: Checkpoint) -> str | None:
    """The base's id on the hub: as it was given, or as its config remembers it."""
    source = without_revision(base.source)
    if not Path(base.source).exists() and source.count("/") == 1:
        return source
    remembered = str(model_config(base.directory).get("_name_or_path"))
    return remembered if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", remembered, re.ASCII) else None
