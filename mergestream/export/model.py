"""Write a merged model as a directory that ``from_pretrained`` loads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mergestream.checkpoints import FLOATS, SafetensorsWriter, TensorSpec, torch_dtype
from mergestream.checkpoints.layout import CARD, DIFFUSERS_STEM
from mergestream.checkpoints.settings import PARTS
from mergestream.digest import TensorHasher, combined_digest
from mergestream.engine import Engine
from mergestream.export.card import hub_id, library_of, model_card
from mergestream.export.companions import (
    ExpertSettings,
    find_settings,
    has_other_class,
    take_settings,
    write_companions,
)
from mergestream.export.directory import DEFAULT_CHOICE, Output, ReadoutChoice
from mergestream.export.places import refuse_overlap
from mergestream.export.source import Source, StateSource, VocabularySource, select_tokens
from mergestream.progress import Progress
from mergestream.store.manifest import Manifest
from mergestream.store.snapshot import Snapshot
from mergestream.store.store import Store
from mergestream.store.transaction import open_snapshot, retried


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
    with retried(store, partial(open_snapshot, store, None, whole=True)) as snapshot, output.draft() as draft:
        yield snapshot, Target(draft, output, store.engine, store.progress)


def with_head(snapshot: Snapshot, target: Target, choice: ReadoutChoice) -> ReadoutChoice:
    """The choice with the head of an expert that is read out alone, if it has one and no other was chosen; else a note
    names the heads that could be added."""
    tasks = snapshot.tasks
    if choice.task is None and choice.one_expert in tasks:
        return replace(choice, task=choice.one_expert)
    if choice.task is None and tasks:
        roles = {tensor.role for tensor in snapshot.manifest.base.tensors.values()}
        base = "the base's head" if "head" in roles else "no head, like the base"
        target.progress.note(f"{target.output} has {base}; --task adds the head of an expert: {', '.join(tasks)}")
    return choice


def write_model(snapshot: Snapshot, target: Target, choice: ReadoutChoice = DEFAULT_CHOICE) -> None:
    """Write merged = θ⁰ + scale · direction, as a store remembers it."""
    progress, task = target.progress, None
    with ExitStack() as files:
        reading = snapshot.reading(target.engine, choice)
        settings = find_settings(snapshot, reading, choice)
        base = files.enter_context(snapshot.manifest.open_base())
        if choice.task is not None:
            task = snapshot.open_task(choice.task)
            files.enter_context(task.heads)
            if task.config is None:
                progress.note(f"{choice.task} has no config.json, so the base's is written: its labels may differ")
        if shortfall := snapshot.shortfall(reading):
            progress.note(shortfall)
        source = StateSource(reading, base, reading.scale(choice.scale, target.engine), task)
        tokens = select_tokens(snapshot, reading, choice.task, files, progress)
        extended = VocabularySource(source, tokens) if tokens else None
        digest = write_tensors(source, extended, target)
        write_files(source, extended, target, digest, snapshot.manifest, settings, choice)


def write_files(
    source: Source,
    extended: VocabularySource | None,
    target: Target,
    digest: str,
    manifest: Manifest,
    settings: ExpertSettings,
    choice: ReadoutChoice = DEFAULT_CHOICE,
    *,
    base_is_merged: bool = False,
) -> None:
    """Write what belongs beside the weights: companions, settings, card and recipe, in this order.

    ``extended`` is the source with new tokens, if there are any, and ``digest`` that of the written tensors.
    """
    draft, output, _, progress = target
    base, config = source.base, source.task.config if source.task else None
    write_companions(draft, base, output.dtype, extended, choice.task or "", config)
    parts = PARTS if config is None else [part for part in PARTS if part != "config"]
    card = model_card(
        manifest,
        source.scale,
        abs(source.scale) * math.sqrt(math.fsum(source.norm2.values())),
        command=output.command,
        task=choice.task,
        reading=source.reading,
        base_is_merged=base_is_merged,
        settings=take_settings(draft, settings, extended, progress, parts),
        library="transformers" if has_other_class(base, config) else library_of(base),
        hub_id=hub_id(base),
    )
    (draft / CARD).write_text(card, encoding="utf-8")
    made_by = "store" if source.reading else "merge"
    output.mark(draft, manifest, {"max_shard_size": output.max_shard_size}, digest, choice, made_by)


def write_tensors(source: Source, extended: VocabularySource | None, target: Target) -> str:
    """Stream every tensor to disk, several at a time, and flush them; returns the digest of all tensors."""
    draft, output, engine, progress = target
    dtype, written = FLOATS.get(output.dtype or ""), extended or source
    layout = {name: cast_spec(spec, dtype) for name, spec in written.layout.items()}

    def write(name: str) -> str:
        hasher = TensorHasher(torch_dtype(layout[name].dtype), layout[name].shape)
        for start, piece in written.pieces(name, layout[name].dtype):
            writer.write_piece(name, start, piece)
            hasher.update(piece)
        return hasher.hexdigest()

    is_diffusers = all(info.file.startswith(DIFFUSERS_STEM) for info in source.base.tensors.values())
    stem = DIFFUSERS_STEM if is_diffusers else "model"
    costs, digests = {name: spec.nbytes for name, spec in layout.items()}, {}
    with (
        SafetensorsWriter(draft, layout, prefix=stem, max_shard_size=output.max_shard_size) as writer,
        progress.task(f"writing {output.path.name}", sum(costs.values())) as advance,
    ):
        for name, digests[name] in engine.run(costs, write, written.memory):
            advance(costs[name])
    return combined_digest(digests)


def cast_spec(spec: TensorSpec, dtype: str | None) -> TensorSpec:
    """The same tensor in another float type, if one is given; integers keep theirs."""
    return TensorSpec(dtype if dtype and spec.is_float else spec.dtype, spec.shape)
