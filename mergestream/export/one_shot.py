"""Merge several experts in one command, without a store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

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
from mergestream.export.card import CardFacts, without_dates
from mergestream.export.companions import write_companions
from mergestream.export.directory import Output
from mergestream.export.model import Target, write_card, write_model, write_tensors
from mergestream.export.places import refuse_overlap
from mergestream.export.recipe import make_recipe
from mergestream.export.settings import Givers, take_settings
from mergestream.export.source import ExpertsSource
from mergestream.export.vocabulary import ExpertTokens, ExtendedVocabularySource
from mergestream.merging.carry import Carry, can_carry
from mergestream.merging.thresholds import find_thresholds
from mergestream.methods import as_method
from mergestream.methods.base import Method
from mergestream.progress import Progress, default_progress
from mergestream.store.add import add_expert
from mergestream.store.candidate import expert_name
from mergestream.store.manifest import Expert, Manifest, Options
from mergestream.store.store import Store


@dataclass(frozen=True)
class MergeInputs:
    """What a merge combines: a base, experts in their order with the options of all, and a method."""

    base: str | Path
    experts: Sequence[str | Path]
    options: Options
    method: Method
    linear: Sequence[str]
    not_linear: Sequence[str]
    base_is_merged: bool = False
    """Whether the base may be one of the experts, as in a plain mean of models"""


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
    inputs = MergeInputs(base, experts, options, method := as_method(method), linear, not_linear)
    if base_is_merged or method.needs_base:
        inputs = dataclasses.replace(inputs, base_is_merged=True)
    output = Output(Path(out), dtype, max_shard_size, overwrite, command)
    refuse_overlap(output.path, base, *experts)
    with output.draft() as draft:
        target = Target(draft, output, engine or LocalEngine(), progress or default_progress())
        if can_carry(inputs.method, len(experts)):
            return _merge_in_one_pass(inputs, target)
        with _temporary_store(inputs, target).snapshot() as snapshot:
            write_model(without_dates(snapshot), target)


def _temporary_store(inputs: MergeInputs, target: Target) -> Store:
    """A store beside the draft, with all experts added."""
    store = Store.create(
        target.draft.with_name("store"),
        inputs.base,
        inputs.method,
        linear=inputs.linear,
        not_linear=inputs.not_linear,
        keep=0,
        engine=target.engine,
        progress=target.progress,
    )
    for expert in inputs.experts:
        add_expert(store, expert, **inputs.options)
    return store


def _merge_in_one_pass(inputs: MergeInputs, target: Target) -> None:
    """Merge each tensor of all experts at once, and write it."""
    draft, output, engine, progress = target
    with ExitStack() as stack:
        base = stack.enter_context(open_checkpoint(inputs.base))
        model = BaseModel.examine(base, linear=inputs.linear, not_linear=inputs.not_linear, measure=False)
        vectors = _open_experts(inputs, model, base, stack, progress)
        names: list[str] = []
        for vector in vectors:
            names.append(expert_name(vector.expert.source, names))
        step = Carry(inputs.method, vectors, names, engine.device)
        source = ExpertsSource(step, base, find_thresholds(inputs.method, vectors, step.counts, None, engine))
        named = dict(zip(names, vectors, strict=True))
        tokens = {name: ExpertTokens(one.tokens, one.expert) for name, one in named.items() if one.tokens}
        extended = ExtendedVocabularySource(source, list(tokens.values()), base) if tokens else None
        digest = write_tensors(extended or source, target)
        manifest = _manifest(source, inputs, progress)
        write_companions(draft, base, output.dtype, extended)
        givers = Givers({name: read_settings(vector.expert.directory) for name, vector in named.items()})
        taken = take_settings(draft, givers, tokens, extended)
        for note in taken.notes:
            progress.note(note)
        facts = CardFacts(manifest, source.scale, source.distance, output.command, settings=taken.summary)
        is_merged = inputs.base_is_merged and any(entry.source == base.source for entry in manifest.history)
        write_card(draft, dataclasses.replace(facts, base_is_merged=is_merged), base)
        form = {"dtype": output.dtype, "max_shard_size": output.max_shard_size}
        output.mark(draft, make_recipe(manifest, form, digest, made_by="merge"))


def _open_experts(
    inputs: MergeInputs, model: BaseModel, base: Checkpoint, stack: ExitStack, progress: Progress
) -> list[TaskVector]:
    """The task vectors of all experts, whose files ``stack`` closes."""
    vectors, notes, options = [], [base.note], inputs.options
    partial, ignore, vocab = options.get("partial", False), options.get("ignore", ()), options.get("vocab")
    for source in inputs.experts:
        expert = open_expert(source)
        stack.callback(expert.close)
        vector = make_task_vector(model, base, expert, partial=partial, ignore=ignore, vocab=vocab)
        for name in vector.heads:  # rows of new tokens: reading them checks them, and adds them to the digest
            vector.head(name)
        notes += [*vector.notes, vector.expert.note]
        vectors.append(vector)
    for note in filter(None, notes):
        progress.note(note)
    return vectors


def _manifest(source: ExpertsSource, inputs: MergeInputs, progress: Progress) -> Manifest:
    """The manifest that a store of these experts would have, for the card and the recipe."""
    history: list[Expert] = []
    found = zip(inputs.experts, source.step.experts, source.step.vectors, source.totals(), strict=True)
    for number, (expert, name, vector, totals) in enumerate(found, 1):
        origin = check_base(vector, vector.norm2)
        if origin.is_other and not inputs.options.get("allow_other_base"):
            raise MergestreamError(f"{origin.note}; pass --allow-other-base to merge it anyway")
        if origin.note:
            progress.note(origin.note)
        digest = combined_digest(vector.digests)
        same = next((old.name for old in history if old.digest == digest), None)
        if totals.norm == 0 and not (inputs.base_is_merged and vector.expert.source == source.model.source):
            same = "the base"
        if same is not None and not inputs.options.get("allow_duplicate"):
            raise MergestreamError(
                f"{vector.expert.source} is the same model as {same}; pass --allow-duplicate to merge it again"
            )
        history.append(
            Expert(
                name=name,
                number=number,
                source=vector.expert.source,
                given=str(expert),
                digest=digest,
                added="",
                seconds=0.0,
                distance=totals.distance,
                rank=0,
                state="",
                record="",
                fates={},
                options=inputs.options,
                **{key: value for key, value in vars(totals).items() if key != "t"},
            )
        )
    tensors = {
        name: dataclasses.replace(tensor, digest=source.base_digests[tensor.tied_to or name])
        for name, tensor in source.model.tensors.items()
    }
    base = dataclasses.replace(source.model, tensors=tensors, given=str(inputs.base))
    return Manifest(inputs.method.name, inputs.method.parameters, base, keep=0, history=tuple(history))
