"""Write a merged model as a directory that ``from_pretrained`` loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from mergestream.checkpoints import FLOATS, Checkpoint, SafetensorsWriter, TensorSpec, torch_dtype
from mergestream.checkpoints.layout import CARD, DIFFUSERS_STEM
from mergestream.checkpoints.settings import PARTS
from mergestream.digest import TensorHasher, combined_digest
from mergestream.engine import Engine
from mergestream.export.card import CardFacts, hub_id, model_card
from mergestream.export.companions import has_other_class, write_companions
from mergestream.export.directory import Output
from mergestream.export.labels import labels
from mergestream.export.places import refuse_overlap
from mergestream.export.recipe import ReadoutChoice, make_recipe
from mergestream.export.settings import find_givers, take_settings
from mergestream.export.source import Source, StateSource
from mergestream.export.vocabulary import ExtendedVocabularySource, select_tokens
from mergestream.progress import Progress
from mergestream.store import transaction
from mergestream.store.manifest import Manifest
from mergestream.store.snapshot import Snapshot
from mergestream.store.store import Store

DrawPictures = Callable[[Manifest, Progress, Path], Mapping[str, str]]
"""Draws the pictures of a card into a directory; returns their file names and captions."""


class Target(NamedTuple):
    """Where and how an export is written."""

    draft: Path
    output: Output
    engine: Engine
    progress: Progress


@contextmanager
def exporting(store: Store, output: Output) -> Iterator[tuple[Snapshot, Target]]:
    """A snapshot of the store, and a draft that replaces the output at the end of the block."""
    refuse_overlap(output.path, *store.sources)

    def open_snapshot() -> Snapshot:
        snapshot = transaction.open_snapshot(store, None)
        try:
            _ = snapshot.settings, snapshot.inputs  # read now: a writer may remove these files later
        except BaseException:
            snapshot.close()
            raise
        return snapshot

    with store.retried(open_snapshot) as snapshot, output.draft() as draft:
        yield snapshot, Target(draft, output, store.engine, store.progress)


def with_head(snapshot: Snapshot, target: Target, choice: ReadoutChoice) -> ReadoutChoice:
    """The choice with the head of an expert that is read out alone; else a note names the heads that could be added."""
    tasks = snapshot.tasks
    choice = choice.with_own_head(tasks)
    if choice.task is None and tasks:
        base = "the base's head" if snapshot.manifest.base.has_head else "no head, like the base"
        target.progress.note(f"{target.output} has {base}; --task adds the head of an expert: {', '.join(tasks)}")
    return choice


def write_model(
    snapshot: Snapshot, target: Target, choice: ReadoutChoice | None = None, draw: DrawPictures | None = None
) -> None:
    """Write merged = θ⁰ + scale · direction: weights, companions, pictures, card and recipe, in this order."""
    draft, output, engine, progress = target
    choice = choice or ReadoutChoice()
    with ExitStack() as stack:
        reading = snapshot.reading(engine, choice, progress)
        givers = find_givers(snapshot, reading, choice)
        base = stack.enter_context(snapshot.manifest.open_base())
        task = snapshot.open_task(choice.task) if choice.task is not None else None
        if task:
            stack.enter_context(task.heads)
            if task.config is None:
                progress.note(f"{choice.task} has no config.json, so the base's is written: its labels may differ")
        if shortfall := snapshot.shortfall(reading):
            progress.note(shortfall)
        scale = reading.scale(choice.scale, engine)
        source = StateSource(reading, base, scale, task)
        tokens = select_tokens(snapshot, reading, choice.task, stack, progress)
        extended = ExtendedVocabularySource(source, list(tokens.values()), base) if tokens else None
        digest = write_tensors(extended or source, target)
        config = task.config if task else None
        own_tokens = tokens[choice.task].tokens if choice.task in tokens else ()
        write_companions(draft, base, output.dtype, extended, config, own_tokens)
        parts = PARTS if config is None else [part for part in PARTS if part != "config"]
        taken = take_settings(draft, givers, tokens, extended, parts)
        for note in taken.notes:
            progress.note(note)
        pictures = draw(snapshot.manifest, progress, draft) if draw else {}
        facts = CardFacts(snapshot.manifest, scale, source.distance, output.command, choice.task, pictures, reading)
        facts = dataclasses.replace(facts, settings=taken.summary)
        write_card(draft, facts, base, has_other_class(base, config))
        form = {"dtype": output.dtype, "max_shard_size": output.max_shard_size}
        output.mark(draft, make_recipe(snapshot.manifest, form, digest, choice))


def write_tensors(source: Source | ExtendedVocabularySource, target: Target) -> str:
    """Stream every tensor to disk, several at a time, and flush them; returns the digest of all tensors."""
    draft, output, engine, progress = target
    dtype = FLOATS.get(output.dtype or "")
    layout = {name: cast_spec(spec, dtype) for name, spec in source.layout.items()}

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


def cast_spec(spec: TensorSpec, dtype: str | None) -> TensorSpec:
    """The same tensor in another float type, if one is given; integers keep theirs."""
    return TensorSpec(dtype if dtype and spec.is_float else spec.dtype, spec.shape)


def write_card(draft: Path, facts: CardFacts, base: Checkpoint, is_other_class: bool = False) -> None:
    """Write the model card, with the labels and the hub id of the base."""
    text = model_card(facts, labels(base, is_other_class), hub_id(base))
    (draft / CARD).write_text(text, encoding="utf-8")


def _stem(base: Checkpoint) -> str:
    """The file name of weights that the base's library expects."""
    is_diffusers = all(info.file.startswith(DIFFUSERS_STEM) for info in base.tensors.values())
    return DIFFUSERS_STEM if is_diffusers else "model"
