"""A candidate: an expert that was opened for a store, and the outcome of absorbing it.

`add` and `inspect` work on one. Nothing counts before the manifest is committed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.base.model import ConfigOnlyBase
from mergestream.base.names import are_adapter_names
from mergestream.checkpoints import Checkpoint, TensorSpec, dtype_name
from mergestream.digest import combined_digest
from mergestream.errors import EngineError, MergestreamError, StoreBusyError, UsageError
from mergestream.escaping import MAX_SENTENCE, one_line
from mergestream.experts import ExpertSource, make_task_vector, open_expert
from mergestream.experts.adapters import Adapter
from mergestream.experts.adapters.vector import AdapterVector
from mergestream.experts.base_check import BaseCheck, check_base, last_part
from mergestream.merging.step import Outcome, StateWriter, Step, Totals, total
from mergestream.progress import NoProgress
from mergestream.store.factors import block_layout, core_layout
from mergestream.store.manifest import Expert, InputsEntry, Options, folder_name
from mergestream.store.records import drop_record, write_record
from mergestream.store.snapshot import Snapshot
from mergestream.store.steps import StepReader, StepWriter, slot_name

if TYPE_CHECKING:
    from mergestream.engine import Engine
    from mergestream.experts.vector import TaskVector
    from mergestream.experts.vocabulary import Vocab
    from mergestream.store.store import Store

LARGE = 5.0
"""An expert with so many times the mean norm of the others gets a note: it dominates the merge"""


class Candidate:
    """An expert that may be added to a store."""

    expert: Expert
    """Its entry in the history, once the step is written"""

    def __init__(self, store: Store, vector: TaskVector, name: str, options: Options, given: str) -> None:
        self.store, self.vector, self.name, self.options, self.given = store, vector, name, options, given
        self.number, self.mark = store.manifest.next_number, store.storage.new_mark()
        self.folder = folder_name(self.number, self.mark)
        self.notes: list[str] = []
        self.outcomes: dict[str, Outcome] = {}
        self.digests: dict[str, str] = {}
        self.step: Step
        self.opened: Checkpoint | Adapter
        """The expert under its own names"""
        self.given_expert: ExpertSource
        self.inputs: InputsEntry | None = None

    @property
    def source(self) -> str:
        return self.vector.expert.source

    @property
    def mean_norm_before(self) -> float:
        """The mean norm of the experts in the store."""
        return self.store.history[-1].mean_norm if self.store.history else 0.0

    @cached_property
    def layout(self) -> dict[str, TensorSpec]:
        """The tensors of the new step: dense slots, and the cores of slots in factors."""
        layout: dict[str, TensorSpec] = {}
        for name, plan in self.step.plans.items():
            for slot, form in plan.layout.items():
                key = slot_name(slot, name)
                if plan.bounds:
                    layout |= core_layout(plan.bounds, key)
                else:
                    layout[key] = TensorSpec(dtype_name(form.dtype), form.shape)
        return layout

    @cached_property
    def blocks(self) -> dict[str, TensorSpec]:
        """What the step may add to the bases of slots in factors."""
        layout: dict[str, TensorSpec] = {}
        for name, plan in self.step.plans.items():
            if plan.bounds:
                layout |= block_layout(plan.bounds, self.vector.model.tensors[name].state_dtype, name)
        return layout

    @contextmanager
    def writing(self) -> Iterator[StepWriter]:
        """Begin the new step, or resume the one of a run with the same plan.

        An error removes the step; an interruption leaves it to be resumed.
        """
        step, storage = self.step, self.store.storage
        plan = {
            "source": self.source,
            "name": self.name,
            "fingerprint": self.vector.expert.fingerprint,
            "after": None if self.cut else [entry.digest for entry in self.store.history],
            "cut": self.cut,
            "commit": self.store.manifest.commit,
            "measured": step.measures_direction,
            **self.options,
        }
        before = step.state if isinstance(step.state, StepReader) else None
        writer = StepWriter(storage, self.folder, plan, layout=self.layout, blocks=self.blocks, before=before)
        try:
            yield writer
        except (EngineError, StoreBusyError):
            writer.pause()
            raise
        except (MergestreamError, OSError):  # free the space, the disk may be full
            writer.abandon()
            drop_record(storage, self.folder)
            raise
        except BaseException:
            writer.pause()
            raise

    def absorb(self, writer: StateWriter, label: str, engine: Engine) -> None:
        """Absorb every tensor, with its progress under a label; resumes what a `StepWriter` has done already."""
        vector = self.vector
        done = writer.done if isinstance(writer, StepWriter) else {}
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
        earlier = {name: digest for name, (_, digest) in done.items() if digest is not None}
        self.digests = {**earlier, **vector.digests}

    def write_record(self, state: str, started: float) -> Expert:
        """Write the record of the expert beside its step; returns its entry in the history."""
        record, totals = write_record(self.store.storage, self.folder, self), self.totals
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
            fates=self.fates,
            options=self._needed_options(),
            cut=self.cut,
            notes=self.notes,
            given=self.given,
            inputs=self.inputs,
            **{key: value for key, value in vars(totals).items() if key != "t"},
        )
        return self.expert

    @cached_property
    def totals(self) -> Totals:
        """The scalars of the store after the step."""
        return total(self.store.method, self.step.t, self.mean_norm_before, self.outcomes.values())

    @cached_property
    def base_check(self) -> BaseCheck:
        """Whether the expert was made from the base."""
        return check_base(self.vector, {name: outcome.norm2 for name, outcome in self.outcomes.items()})

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
        """For how many experts its entry is cut; 0 where there is no entry."""
        return self.store.method.cut(self.step.t)

    @property
    def rank(self) -> int:
        """The largest rank that a tensor in factors may have now; in a ledger, the rank of the adapter."""
        return max((plan.rank for plan in self.step.plans.values()), default=0)

    @property
    def fates(self) -> dict[str, int]:
        """How many tensors were merged, copied, kept as a head, tied, unchanged, ignored."""
        return dict(sorted(Counter(self.vector.actions.values()).items()))

    def snapshot(self) -> Snapshot:
        """The store as it would be with this expert."""
        return Snapshot.open(self.store.storage, self.store.manifest.with_expert(self.expert))

    def check_entries(self) -> str | None:
        """Check the singular values and norms of all entries of a ledger, this expert's included.

        Returns a sentence if the entries hold too little with this expert.
        """
        if not self.cut:
            return None
        with self.snapshot() as after:
            reading = after.reading(self.store.engine)
            return reading.shortfall(reading) if reading.least_held < 1 else None

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

    def _needed_options(self) -> Options:
        """The options that were given, and those that adding the expert again would need."""
        options: Options = {**self.options}
        if self.duplicate_of is not None or self.totals.norm == 0:
            options["allow_duplicate"] = True
        if self.base_check.is_other:
            options["allow_other_base"] = True
        return options


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
        known_name = free_name(name, vector.expert.source, manifest.names)
        candidate = Candidate(store, vector, known_name, options, "" if isinstance(expert, Mapping) else str(expert))
        candidate.opened, candidate.given_expert = opened, expert
        if isinstance(vector, AdapterVector) and not method.factored:
            candidate.note(f"{method.name} needs dense tensors: the adapter is multiplied out, tensor by tensor")
        for sentence in vector.notes:
            candidate.note(sentence)
        before = files.enter_context(Snapshot.open(store.storage, manifest)) if manifest.history else None
        candidate.step = Step(
            method=method,
            vector=vector,
            expert=known_name,
            absorbed=manifest.step,
            state=before.state if before and not manifest.entries else None,
            demands=before.reading(store.engine).demands if before and manifest.entries else {},
            device=store.engine.device,
            measure_direction=measure_distance,
        )
        yield candidate


def check_experts(store: Store, experts: Sequence[tuple[str | None, str]], **options: Any) -> None:
    """Check names and headers of all experts, before the first one is added; ``options`` as in `open_candidate`."""
    taken, progress = list(store.manifest.names), store.progress
    store.progress = NoProgress()  # the notes come when each one is added
    try:
        for name, expert in experts:
            with open_candidate(store, expert, name, **options) as candidate:
                taken.append(free_name(name, candidate.source, taken))
    finally:
        store.progress = progress


def free_name(name: str | None, source: str, taken: Collection[str]) -> str:
    """The name of a new expert: the user's choice, or the last part of its source."""
    if name is not None and (not (name.strip() and name.isprintable()) or "/" in name or name in (".", "..")):
        raise UsageError(
            f"{name!r} cannot be the name of an expert; choose a --name that can be printed and has no slash"
        )
    if name in taken:
        raise MergestreamError(f"an expert named {name} has been absorbed already; choose another --name")
    return expert_name(source, taken) if name is None else name


def expert_name(source: str, taken: Collection[str]) -> str:
    """The last part of the path or hub id, numbered where another expert has that name."""
    stem = last_part(source)
    candidates = (stem if i == 1 else f"{stem}-{i}" for i in range(1, len(taken) + 2))
    return next(candidate for candidate in candidates if candidate not in taken)
