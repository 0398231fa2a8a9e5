"""`add`: open an expert, check it, absorb every tensor, check the gates, commit."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.base.model import ConfigOnlyBase
from mergestream.base.names import are_adapter_names
from mergestream.checkpoints import Checkpoint
from mergestream.digest import combined_digest
from mergestream.errors import EngineError, MergestreamError, StoreBusyError, UsageError
from mergestream.escaping import MAX_SENTENCE, one_line
from mergestream.experts import ExpertSource, make_task_vector, open_expert
from mergestream.experts.adapters.adapter import Adapter
from mergestream.experts.base_check import BaseCheck, check_base, last_part
from mergestream.inputs.reading import Inputs, Source
from mergestream.merging.step import Outcome, StateWriter, Step, Totals, total
from mergestream.progress import NoProgress
from mergestream.store.expert import Expert, InputsEntry, Options, folder_name
from mergestream.store.inputs import measure_inputs, read_samples, write_inputs
from mergestream.store.records import drop_record, write_record
from mergestream.store.shorten import shorten_entries
from mergestream.store.snapshot import Snapshot
from mergestream.store.steps import StepWriter
from mergestream.store.transaction import clean_up_after_commit, commit, writing

if TYPE_CHECKING:
    from mergestream.engine import Engine
    from mergestream.experts.vector import TaskVector
    from mergestream.experts.vocabulary import Vocab
    from mergestream.store.store import Store

LARGE = 5.0
"""An expert gets a note if its norm is more than this times the mean of the others: it dominates the merge"""


def add_expert(
    store: Store,
    expert: ExpertSource,
    name: str | None = None,
    *,
    allow_duplicate: bool = False,
    allow_other_base: bool = False,
    review: Callable[[Candidate], Expert] | None = None,
    inputs: Source | Inputs | None = None,
    **options: Any,
) -> Expert:
    """Add an expert as one transaction; ``options`` are those of `open_candidate`, ``inputs`` what it is run on.

    The step is written to a new folder, and counts once the manifest names it. Until then an error leaves the store as
    it was, and the next call resumes an interrupted step. ``review`` returns the entry of the candidate, with the
    results of gates and evaluation, or refuses it by raising a MergestreamError.
    """
    started = time.monotonic()
    given = None if inputs is None else Inputs.of(inputs)
    samples = read_samples(store, given) if given else []
    with writing(store), open_candidate(store, expert, name, **options) as candidate:
        if name is None and isinstance(expert, str | Path) and candidate.name != last_part(candidate.source):
            candidate.note(
                f"{candidate.source} is called {candidate.name}, because another expert has its name already"
            )
        with candidate.writing() as writer:
            if given:
                found = measure_inputs(candidate, given, samples, candidate.cut)
                record = write_inputs(store.storage, candidate.folder, found)
                candidate.inputs = InputsEntry(candidate.number, found.count, record, candidate.mark)
            candidate.absorb(writer, "absorbing", store.engine)
            candidate.check(allow_duplicate, allow_other_base)
            candidate.note_oddities()
            added = candidate.write_record(writer.finish(candidate.outcomes), started)
            shortfall = candidate.shortfall()
            if review:
                added = review(candidate)
            commit(store, dataclasses.replace(store.manifest, base=candidate.vector.model).with_expert(added))
        clean_up_after_commit(store)
        shorten_entries(store)
        if shortfall:
            store.progress.note(shortfall)
    return added


@dataclass
class Candidate:
    """An expert that was opened for a store, and the outcome of absorbing it; it counts once it is committed."""

    store: Store
    given: ExpertSource
    opened: Checkpoint | Adapter
    """The expert under its own names"""
    vector: TaskVector
    name: str
    options: Options
    step: Step
    notes: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    inputs: InputsEntry | None = None
    totals: Totals = field(init=False)
    """The scalars of the store after the step"""
    base_check: BaseCheck = field(init=False)
    """Whether the expert was made from the base"""
    expert: Expert = field(init=False)
    """Its entry in the history, once the step is written"""

    def __post_init__(self) -> None:
        self.number, self.mark = self.store.manifest.next_number, self.store.storage.new_mark()
        self.folder = folder_name(self.number, self.mark)

    @property
    def source(self) -> str:
        return self.vector.expert.source

    @property
    def mean_norm_before(self) -> float:
        """The mean norm of the experts in the store."""
        return self.store.history[-1].mean_norm if self.store.history else 0.0

    @contextmanager
    def writing(self) -> Iterator[StepWriter]:
        """Begin the new step, or resume the one of a run with the same plan.

        An error removes the step; an interruption leaves it to be resumed.
        """
        plan = {
            "source": self.source,
            "name": self.name,
            "fingerprint": self.vector.expert.fingerprint,
            "after": None if self.cut else [entry.digest for entry in self.store.history],
            "cut": self.cut,
            "commit": self.store.manifest.commit,
            "measured": self.step.measures_direction,
            **self.options,
        }
        writer = StepWriter(self.store.storage, self.folder, plan, self.step)
        try:
            yield writer
        except BaseException as error:
            if isinstance(error, MergestreamError | OSError) and not isinstance(error, EngineError | StoreBusyError):
                writer.abandon()  # to free the space, for the disk may be full
                drop_record(self.store.storage, self.folder)
            else:
                writer.pause()
            raise

    def absorb(self, writer: StateWriter, label: str, engine: Engine) -> None:
        """Absorb every tensor, with its progress under a label; resumes what a `StepWriter` has done already."""
        vector, done = self.vector, writer.done if isinstance(writer, StepWriter) else {}
        self.outcomes = {name: outcome for name, (outcome, _) in done.items()}
        sizes = {name: vector.model.tensors[name].numel for name in vector.names}
        waiting = sum(size for name, size in sizes.items() if name not in done)
        with self.store.progress.task(f"{label} {Path(self.source).name}", 4 * waiting) as advance:
            for name, outcome in self.step.run(engine, writer, done=done):
                self.outcomes[name] = outcome
                if isinstance(writer, StepWriter):
                    writer.record(name, outcome, vector.digests.get(name))
                advance(4 * sizes[name])
        for name in vector.heads:
            vector.head(name)
        self.digests = {name: digest for name, (_, digest) in done.items() if digest is not None} | vector.digests
        self.totals = total(self.store.method, self.step.t, self.mean_norm_before, self.outcomes.values())
        self.base_check = check_base(vector, {name: outcome.norm2 for name, outcome in self.outcomes.items()})

    def check(self, allow_duplicate: bool, allow_other_base: bool) -> None:
        """Refuse an expert that the store has already, that changes nothing, or that was made from another base."""
        if self.duplicate_of is not None and not allow_duplicate:
            raise MergestreamError(
                f"{self.source} has been absorbed already, as {self.duplicate_of}; "
                "pass --allow-duplicate to add it once more"
            )
        if self.totals.norm == 0 and not allow_duplicate:
            raise MergestreamError(f"{self.source} is identical to the base; pass --allow-duplicate to add it anyway")
        if self.base_check.is_other and not allow_other_base:
            raise MergestreamError(f"{self.base_check.note}; pass --allow-other-base to add it anyway")

    def write_record(self, state: str, started: float) -> Expert:
        """Write the record of the expert; returns its entry in the history."""
        record, totals = write_record(self.store.storage, self.folder, self), self.totals
        options: Options = {**self.options}  # with those that adding it again would need
        if self.duplicate_of is not None or totals.norm == 0:
            options["allow_duplicate"] = True
        if self.base_check.is_other:
            options["allow_other_base"] = True
        self.expert = Expert(
            name=self.name,
            number=self.number,
            mark=self.mark,
            source=self.source,
            digest=self.digest,
            added=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - started, 3),
            distance=totals.distance,
            rank=self.rank,
            state=state,
            record=record,
            fates=self.action_counts,
            options=options,
            cut=self.cut,
            notes=self.notes,
            given=str(self.given) if isinstance(self.given, str | Path) else "",
            inputs=self.inputs,
            **{key: value for key, value in vars(totals).items() if key != "t"},
        )
        return self.expert

    @property
    def digest(self) -> str:
        """The digest of all tensors of the expert."""
        return combined_digest(self.digests)

    @property
    def duplicate_of(self) -> str | None:
        """The name under which the same expert was added before."""
        return next((entry.name for entry in self.store.history if entry.digest == self.digest), None)

    @property
    def cut(self) -> int:
        """Among how many experts the budget is divided when the entry is written; 0 where there is no entry."""
        return self.store.method.cut(self.step.t)

    @property
    def rank(self) -> int:
        """The largest rank that a tensor in factors may have now; in a ledger, the rank of the adapter."""
        return max((plan.rank for plan in self.step.plans.values()), default=0)

    @property
    def action_counts(self) -> dict[str, int]:
        """How many tensors were merged, copied, kept as a head, tied, unchanged, ignored."""
        return dict(sorted(Counter(self.vector.actions.values()).items()))

    def snapshot(self) -> Snapshot:
        """The store as it would be with this expert."""
        return Snapshot.open(self.store.storage, self.store.manifest.with_expert(self.expert))

    def shortfall(self) -> str | None:
        """A warning if the entries of adapters hold too little with this expert."""
        if not self.store.manifest.with_expert(self.expert).adapters:
            return None
        with self.snapshot() as after:
            return after.shortfall()

    def note(self, sentence: str) -> None:
        """Show a note to the user, and keep it for the history as one printable line."""
        self.notes.append(one_line(sentence, MAX_SENTENCE))
        self.store.progress.note(self.notes[-1])

    def note_oddities(self) -> None:
        """Note an expert that was changed, has another or an unknown base, or dominates the others."""
        for sentence in filter(None, (self.vector.expert.note, self.base_check.note)):
            self.note(sentence)
        mean = self.mean_norm_before
        if mean and self.totals.norm >= LARGE * mean:
            self.note(
                f"the task vector of {self.source} is {self.totals.norm / mean:.1f} times as long as the mean of the "
                "experts before it, and outweighs them"
            )


@contextmanager
def open_candidate(
    store: Store,
    expert: ExpertSource,
    name: str | None = None,
    *,
    partial: bool = False,
    ignore: Sequence[str] = (),
    vocab: Vocab | None = None,
    heads: Sequence[str] = (),
    measure_distance: bool = False,
) -> Iterator[Candidate]:
    """Open an expert and check it against the base by its headers; the files are closed at the end of the block.

    ``measure_distance``: measure the distance to the base even where the method's scale does not need it.
    """
    options: Options = {"partial": partial, "ignore": list(ignore)}
    if vocab is not None:
        options["vocab"] = vocab
    manifest, method = store.manifest, store.method
    with ExitStack() as files:
        model, opened = manifest.base.with_heads(heads), open_expert(expert)
        files.callback(opened.close)
        base: Checkpoint
        in_factors = opened.is_in_factors if isinstance(opened, Adapter) else are_adapter_names(opened.tensors)
        if not model.measured and in_factors:
            base = ConfigOnlyBase(model.source, None, model.tensors)
        else:
            base = files.enter_context(manifest.open_base())
            if not model.measured:  # from now on it must not change
                model = model.with_weights(base, store.engine, store.progress)
        vector = make_task_vector(model, base, opened, partial=partial, ignore=ignore, vocab=vocab)
        name = free_name(name, vector.expert.source, manifest.names)
        before = files.enter_context(Snapshot.open(store.storage, manifest)) if manifest.history else None
        step = Step(
            method=method,
            vector=vector,
            expert=name,
            absorbed=manifest.step,
            state=before.state if before and not manifest.entries else None,
            wanted_ranks=before.reading(store.engine).wanted_ranks if before and manifest.entries else {},
            device=store.engine.device,
            measure_direction=measure_distance,
        )
        candidate = Candidate(store, expert, opened, vector, name, options, step)
        if vector.adapter and not method.factored:
            candidate.note(f"{method.name} needs dense tensors: the adapter is multiplied out, tensor by tensor")
        for sentence in vector.notes:
            candidate.note(sentence)
        yield candidate


def check_experts(
    store: Store,
    experts: Sequence[tuple[str | None, str]],
    *,
    partial: bool = False,
    ignore: Sequence[str] = (),
    vocab: Vocab | None = None,
    heads: Sequence[str] = (),
) -> None:
    """Check names and headers of all experts, before the first one is added; the options are those of `Store.add`."""
    options: dict[str, Any] = {"partial": partial, "ignore": ignore, "vocab": vocab, "heads": heads}
    taken, progress = list(store.manifest.names), store.progress
    store.progress = NoProgress()  # the notes come when each one is added
    try:
        for name, expert in experts:
            with open_candidate(store, expert, name, **options) as candidate:
                taken.append(free_name(name, candidate.source, taken))
    finally:
        store.progress = progress


def free_name(name: str | None, source: str, taken: Collection[str]) -> str:
    """The name of a new expert: the user's choice, or the last part of its source, numbered if that is taken."""
    if name is None:
        stem = last_part(source)
        candidates = (stem if i == 1 else f"{stem}-{i}" for i in range(1, len(taken) + 2))
        return next(candidate for candidate in candidates if candidate not in taken)
    if not (name.strip() and name.isprintable()) or "/" in name or name in (".", ".."):
        raise UsageError(
            f"{name!r} cannot be the name of an expert; choose a --name that can be printed and has no slash"
        )
    if name in taken:
        raise MergestreamError(f"an expert named {name} has been absorbed already; choose another --name")
    return name
