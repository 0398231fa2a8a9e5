"""Write a merged model as a directory that ``from_pretrained`` loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mergestream.checkpoints import FLOATS, SafetensorsWriter, TensorSpec, torch_dtype
from mergestream.checkpoints.layout import CARD, DIFFUSERS_STEM
from mergestream.checkpoints.settings import PARTS
from mergestream.digest import TensorHasher, combined_digest
from mergestream.engine import Engine
from mergestream.export.card import CardFacts, hub_id, library_of, model_card
from mergestream.export.companions import Givers, find_givers, has_other_class, take_settings, write_companions
from mergestream.export.directory import Output, ReadoutChoice
from mergestream.export.places import refuse_overlap
from mergestream.export.source import ExpertTokens, Source, StateSource, VocabularySource, select_tokens
from mergestream.progress import Progress
from mergestream.store.manifest import Manifest
from mergestream.store.snapshot import Snapshot
from mergestream.store.store import Store
from mergestream.store.transaction import open_snapshot


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
    with store.retried(partial(open_snapshot, store, None, whole=True)) as snapshot, output.draft() as draft:
        yield snapshot, Target(draft, output, store.engine, store.progress)


def with_head(snapshot: Snapshot, target: Target, choice: ReadoutChoice) -> ReadoutChoice:
    """The choice with the head of an expert that is read out alone, if it has one and no other was chosen; else a note
    names the heads that could be added."""
    tasks = snapshot.tasks
    if choice.task is None and choice.one_expert in tasks:
        return replace(choice, task=choice.one_expert)
    if choice.task is None and tasks:
        base = "the base's head" if snapshot.manifest.base.has_head else "no head, like the base"
        target.progress.note(f"{target.output} has {base}; --task adds the head of an expert: {', '.join(tasks)}")
    return choice


def write_model(snapshot: Snapshot, target: Target, choice: ReadoutChoice | None = None) -> None:
    """Write merged = θ⁰ + scale · direction, as a store remembers it."""
    choice, progress = choice or ReadoutChoice(), target.progress
    with ExitStack() as stack:
        reading = snapshot.reading(target.engine, choice, progress)
        givers = find_givers(snapshot, reading, choice)
        base = stack.enter_context(snapshot.manifest.open_base())
        task = snapshot.open_task(choice.task) if choice.task is not None else None
        if task:
            stack.enter_context(task.heads)
            if task.config is None:
                progress.note(f"{choice.task} has no config.json, so the base's is written: its labels may differ")
        if shortfall := snapshot.shortfall(reading):
            progress.note(shortfall)
        source = StateSource(reading, base, reading.scale(choice.scale, target.engine), task)
        tokens = select_tokens(snapshot, reading, choice.task, stack, progress)
        write_merged(source, target, tokens, givers, lambda: snapshot.manifest, choice)


def write_merged(
    source: Source,
    target: Target,
    tokens: Mapping[str, ExpertTokens],
    givers: Givers,
    make_manifest: Callable[[], Manifest],
    choice: ReadoutChoice | None = None,
    **facts: Any,
) -> None:
    """Write weights, companions, settings, card and recipe, in this order.

    ``tokens`` are new tokens in the model, by expert. The manifest is made when all tensors were read; ``facts`` are
    further fields of `CardFacts`.
    """
    draft, output, _, progress = target
    choice, base = choice or ReadoutChoice(), source.base
    extended = VocabularySource(source, list(tokens.values()), base) if tokens else None
    digest = write_tensors(extended or source, target)
    manifest = make_manifest()
    config = source.task.config if source.task else None
    own_tokens = tokens[choice.task].tokens if choice.task and choice.task in tokens else ()
    write_companions(draft, base, output.dtype, extended, config, own_tokens)
    parts = PARTS if config is None else [part for part in PARTS if part != "config"]
    settings = take_settings(draft, givers, tokens, extended, progress, parts)
    card = CardFacts(
        manifest,
        source.scale,
        source.distance,
        output.command,
        choice.task,
        settings=settings,
        **{"reading": source.reading, **facts},
    )
    library = "transformers" if has_other_class(base, config) else library_of(base)
    (draft / CARD).write_text(model_card(card, library, hub_id(base)), encoding="utf-8")
    made_by = "store" if source.reading else "merge"
    output.mark(draft, manifest, {"max_shard_size": output.max_shard_size}, digest, choice, made_by)


def write_tensors(source: Source | VocabularySource, target: Target) -> str:
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

    is_diffusers = all(info.file.startswith(DIFFUSERS_STEM) for info in source.base.tensors.values())
    stem = DIFFUSERS_STEM if is_diffusers else "model"
    costs, digests = {name: spec.nbytes for name, spec in layout.items()}, {}
    with (
        SafetensorsWriter(draft, layout, prefix=stem, max_shard_size=output.max_shard_size) as writer,
        progress.task(f"writing {output.path.name}", sum(costs.values())) as advance,
    ):
        for name, digests[name] in engine.run(costs, write, source.memory):
            advance(costs[name])
    return combined_digest(digests)


def cast_spec(spec: TensorSpec, dtype: str | None) -> TensorSpec:
    """The same tensor in another float type, if one is given; integers keep theirs."""
    return TensorSpec(dtype if dtype and spec.is_float else spec.dtype, spec.shape)
