"""Merge several models that are all at hand, in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path

from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from mergestream.checkpoints.location import shown
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.digest import combined_digest
from mergestream.engine import Engine, LocalEngine
from mergestream.errors import MergestreamError, UsageError
from mergestream.experts import make_task_vector, open_expert
from mergestream.experts.base_check import check_base
from mergestream.experts.vocabulary import Vocab
from mergestream.export.card import CardFacts, CardRow
from mergestream.export.directory import Output
from mergestream.export.model import write_companions, write_model, write_tensors
from mergestream.export.provenance import Added, Provenance, undated
from mergestream.export.recipe import BaseUsed, ExpertUsed, Form, Recipe
from mergestream.export.source import ExpertsSource
from mergestream.export.vocabulary import GrownSource, Speaker
from mergestream.merging.step import Step, carries_through
from mergestream.merging.thresholds import find_thresholds
from mergestream.methods import as_method
from mergestream.methods.base import Method
from mergestream.progress import Progress, default_progress
from mergestream.store.directory import StoreDirectory, expert_name
from mergestream.store.manifest import Options


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
    dtype: str | None = None,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    engine: Engine | None = None,
    progress: Progress | None = None,
    command: str | None = None,
    names: Sequence[str] | None = None,
    approve: Callable[[Recipe], None] | None = None,
) -> None:
    """Merge ``experts`` in their order by a method, or the one of that name, and write the result to ``out``.

    They are called by ``names``, or by the last parts of their paths. ``approve`` may refuse what was made, by raising
    an error, before it takes its place.

    Where the method allows it, each tensor is carried through all models and written straight to the
    output, so that every file is read once; otherwise the models pass through a temporary store.
    """
    method = as_method(method)
    if vocab == "union":
        raise UsageError(
            "--vocab union keeps new tokens with each expert in a store, and a merge has none: base or grow"
        )
    output = Output(Path(out), dtype, max_shard_size, overwrite, command)
    output.keep_off(base, *experts)
    engine = engine or LocalEngine()
    progress = progress or default_progress()
    if not carries_through(method, len(experts)):
        with output.draft() as draft:
            path = draft.with_name("store")
            store = StoreDirectory.create(
                path, base, method, linear=linear, not_linear=not_linear, keep=0, engine=engine, progress=progress
            )
            for expert, name in zip_longest(experts, names or ()):
                store.absorb(expert, name, partial, ignore, allow_duplicate, allow_other_base, vocab=vocab)
            with store.snapshot() as snapshot:
                write_model(undated(snapshot), draft, output, engine, progress)
        return
    with ExitStack() as stack:
        opened = stack.enter_context(open_checkpoint(base))
        model = BaseModel.examine(opened, linear=linear, not_linear=not_linear, measure=False)
        vectors = []
        for expert in experts:
            found = open_expert(expert)
            stack.callback(found.close)
            vectors.append(make_task_vector(model, opened, found, partial=partial, ignore=ignore, vocab=vocab))
            for sentence in vectors[-1].notes:
                progress.note(sentence)
            for name in vectors[-1].heads:  # new tokens: to be checked, and to tell duplicates
                vectors[-1].head(name)
        for note in (opened.note, *(vector.expert.note for vector in vectors)):
            if note:
                progress.note(note)
        called = list(names or ())
        for vector in vectors[len(called) :]:
            called.append(expert_name(vector.expert.source, called))
        step = Step(method, vectors, device=engine.device, experts=called)
        source = ExpertsSource(step, opened, find_thresholds(step, engine))
        speakers = [Speaker(vector.tokens, vector.expert) for vector in vectors if vector.tokens]
        grown = GrownSource(source, speakers, opened) if speakers else None
        draft = stack.enter_context(output.draft())
        result = write_tensors(grown or source, draft, output, engine, progress)
        _check_origins(source, progress, allow_other_base)
        given = [str(base), *map(str, experts)]
        card = _card(source, given, command, allow_duplicate)
        write_companions(draft, output, opened, card, grown=grown)
        options: Options = {"partial": partial, "ignore": list(ignore), "allow_duplicate": allow_duplicate}
        options["allow_other_base"] = allow_other_base
        if vocab is not None:
            options["vocab"] = vocab
        form = Form(dtype=output.dtype, max_shard_size=max_shard_size)
        recipe = _recipe(source, card, result, options, form)
        if approve:
            approve(recipe)
        output.mark(draft, recipe.to_json())


def _recipe(source: ExpertsSource, card: CardFacts, result: str, options: Options, form: Form) -> Recipe:
    base = BaseUsed(card.base, source.base_digest, source.model.linear, source.model.not_linear)
    experts = tuple(ExpertUsed(came.name, came.source, came.digest, options) for came in card.provenance.experts)
    return Recipe("merge", base, card.method, card.parameters, experts, form, result)


def _check_origins(source: ExpertsSource, progress: Progress, allow_other_base: bool) -> None:
    """Refuse a model of another base, or tell of it where it is allowed."""
    for vector in source.step.vectors:
        found = check_base(vector, vector.norm2)
        if found.is_other and not allow_other_base:
            raise MergestreamError(f"{found.note}; pass --allow-other-base to merge it all the same")
        if found.note:
            progress.note(found.note)


def _card(source: ExpertsSource, given: Sequence[str], command: str | None, allow_duplicate: bool) -> CardFacts:
    """``given`` is how the user has named base and experts."""
    rows: list[CardRow] = []
    added: list[Added] = []
    steps = zip(source.step.experts, source.step.vectors, source.totals(), given[1:], strict=True)
    for name, vector, totals, named in steps:
        digest = combined_digest(vector.digests)
        same = "the base" if totals.norm == 0 else next((row.name for row in rows if row.digest == digest), None)
        if same is not None and not allow_duplicate:
            raise MergestreamError(
                f"{vector.expert.source} is the same model as {same}; pass --allow-duplicate to merge it again"
            )
        rows.append(CardRow(name, digest, totals.norm, totals.kept, totals.scale))
        added.append(Added(name, shown(vector.expert.source, named), digest, totals.norm, totals.kept))
    method, base = source.step.method, shown(source.base.source, given[0])
    about = base, method.name, method.parameters, rows, source.scale, source.distance
    return CardFacts(*about, command=command, provenance=Provenance(added))
