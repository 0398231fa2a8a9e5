"""Merge several experts in one command, without a store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mergestream.base.model import BaseModel
from mergestream.checkpoints import Checkpoint, open_checkpoint
from mergestream.checkpoints.settings import read_settings
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.digest import combined_digest
from mergestream.engine import Engine, LocalEngine
from mergestream.errors import MergestreamError, UsageError
from mergestream.experts import make_task_vector, open_expert
from mergestream.experts.base_check import check_base
from mergestream.experts.vector import TaskVector
from mergestream.experts.vocabulary import Vocab
from mergestream.export.companions import ExpertSettings
from mergestream.export.directory import Output
from mergestream.export.model import Target, write_files, write_model, write_tensors
from mergestream.export.places import refuse_overlap
from mergestream.export.source import ExpertTokens, VocabularySource
from mergestream.merging.one_pass import OnePassMerge, is_possible
from mergestream.methods import as_method
from mergestream.methods.base import Method
from mergestream.progress import Progress, default_progress
from mergestream.store.add import add_expert, free_name
from mergestream.store.expert import Expert, Options
from mergestream.store.manifest import Manifest
from mergestream.store.store import Store


def merge(
    base: str | Path,
    experts: Sequence[str | Path],
    out: str | Path,
    method: Method | str | None = None,
    *,
    linear: Sequence[str] = (),
    not_linear: Sequence[str] = (),
    partial: bool = False,
    ignore: Sequence[str] = (),
    vocab: Vocab | None = None,
    allow_duplicate: bool = False,
    allow_other_base: bool = False,
    base_is_merged: bool = False,
    dtype: str | None = None,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    engine: Engine | None = None,
    progress: Progress | None = None,
    command: str | None = None,
) -> None:
    """Merge ``experts`` in their order with a method, or the method of that name, and write the result to ``out``.

    If the method allows it, each tensor is merged in one pass over all experts and written at once, so that every file
    is read once; otherwise the experts pass through a temporary store. With ``base_is_merged`` the base may be listed
    as one of the ``experts``: `SLERP` and the plain mean of models have no other base.
    """
    if vocab == "union":
        raise UsageError(
            "--vocab union keeps new tokens with each expert in a store, which a merge does not have; pass base or grow"
        )
    options: Options = {"partial": partial, "ignore": list(ignore), "allow_duplicate": allow_duplicate}
    options["allow_other_base"] = allow_other_base
    if vocab is not None:
        options["vocab"] = vocab
    method = as_method(method)
    if method.needs_base and len(experts) == 1:
        raise UsageError(f"{method.name} joins models with each other; name both, also if one of them is the base")
    globs: dict[str, Any] = {"linear": linear, "not_linear": not_linear}
    output = Output(Path(out), dtype, max_shard_size, overwrite, command)
    refuse_overlap(output.path, base, *experts)
    with output.draft() as draft, ExitStack() as files:
        target = Target(draft, output, engine or LocalEngine(), progress or default_progress())
        if is_possible(method, len(experts)):
            opened = files.enter_context(open_checkpoint(base))
            model = dataclasses.replace(BaseModel.examine(opened, **globs, measure=False), given=str(base))
            is_merged = base_is_merged or method.needs_base
            return _merge_in_one_pass(model, opened, experts, method, options, is_merged, target, files)
        running: dict[str, Any] = {"engine": target.engine, "progress": target.progress}
        store = Store.create(draft.with_name("store"), base, method, keep=0, **globs, **running)
        for expert in experts:
            add_expert(store, expert, **options)
        snapshot = files.enter_context(store.snapshot())
        # Without times, so that the card is the same on every run.
        history = tuple(dataclasses.replace(entry, added="") for entry in snapshot.manifest.history)
        manifest = dataclasses.replace(snapshot.manifest, history=history)
        write_model(dataclasses.replace(snapshot, manifest=manifest), target)


def _merge_in_one_pass(
    model: BaseModel,
    base: Checkpoint,
    experts: Sequence[str | Path],
    method: Method,
    options: Options,
    base_is_merged: bool,
    target: Target,
    files: ExitStack,
) -> None:
    """Merge each tensor of all experts at once, and write it."""
    progress, notes = target.progress, [base.note]
    partial, ignore, vocab = options.get("partial", False), options.get("ignore", ()), options.get("vocab")
    vectors: dict[str, TaskVector] = {}
    for given in experts:
        expert = open_expert(given)
        files.callback(expert.close)
        vector = make_task_vector(model, base, expert, partial=partial, ignore=ignore, vocab=vocab)
        for name in vector.heads:  # rows of new tokens: reading them checks them, and adds them to the digest
            vector.head(name)
        notes += [*vector.notes, vector.expert.note]
        vectors[free_name(None, vector.expert.source, vectors)] = vector
    for note in filter(None, notes):
        progress.note(note)
    source = OnePassMerge.of(method, vectors, target.engine)
    tokens = {name: ExpertTokens(one.tokens, one.expert) for name, one in vectors.items() if one.tokens}
    settings = ExpertSettings({name: read_settings(one.expert.directory) for name, one in vectors.items()})
    extended = VocabularySource(source, tokens) if tokens else None
    digest = write_tensors(source, extended, target)
    for vector in vectors.values():
        origin = check_base(vector, vector.norm2)
        if origin.is_other and not options["allow_other_base"]:
            raise MergestreamError(f"{origin.note}; pass --allow-other-base to merge it anyway")
        if origin.note:
            progress.note(origin.note)
    manifest = _make_manifest(source, experts, options, base_is_merged)
    is_merged = base_is_merged and any(one.expert.source == base.source for one in vectors.values())
    write_files(source, extended, target, digest, manifest, settings, base_is_merged=is_merged)


def _make_manifest(
    source: OnePassMerge, experts: Sequence[str | Path], options: Options, base_is_merged: bool
) -> Manifest:
    """The manifest that a store of these experts would have, once all tensors were read; refuses duplicates."""
    history: list[Expert] = []
    for given, (name, vector), totals in zip(experts, source.vectors.items(), source.totals(), strict=True):
        found, digest = vector.expert.source, combined_digest(vector.digests)
        same = next((old.name for old in history if old.digest == digest), None)
        if totals.norm == 0 and not (base_is_merged and found == source.base.source):
            same = "the base"
        if same is not None and not options["allow_duplicate"]:
            raise MergestreamError(f"{found} is the same model as {same}; pass --allow-duplicate to merge it again")
        history.append(
            Expert(
                name=name,
                number=len(history) + 1,
                source=found,
                given=str(given),
                digest=digest,
                added="",
                seconds=0.0,
                distance=totals.distance,
                rank=0,
                state="",
                record="",
                fates={},
                options=options,
                **{key: value for key, value in vars(totals).items() if key != "t"},
            )
        )
    tensors = {
        name: dataclasses.replace(tensor, digest=source.base_digests[tensor.tied_to or name])
        for name, tensor in source.model.tensors.items()
    }
    method, measured = source.method, dataclasses.replace(source.model, tensors=tensors)
    return Manifest(method.name, method.parameters, measured, keep=0, history=tuple(history))
