"""A model that has arrived at a store: everything from its files to the outcome of absorbing it."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.base.config_only import ConfigOnlyBase
from mergestream.checkpoints import Checkpoint, TensorSpec, dtype_name
from mergestream.digest import combined_digest
from mergestream.errors import MergestreamError
from mergestream.escaping import MAX_SENTENCE, one_line
from mergestream.experts import ExpertSource, make_task_vector, open_expert
from mergestream.experts.adapters import Adapter
from mergestream.experts.base_check import BaseCheck, check_base
from mergestream.experts.sketch import Sketch
from mergestream.ledger.method import FEWEST
from mergestream.ledger.selection import Selection
from mergestream.merging.memory import KeptExpert, read_out
from mergestream.merging.step import Discard, Outcome, StateWriter, Step, Totals, total
from mergestream.store.factors import block_layout, core_layout
from mergestream.store.manifest import Expert, Options, folder_name
from mergestream.store.records import copy_record, cosines_to, write_record
from mergestream.store.snapshot import Snapshot
from mergestream.store.steps import StepWriter, slot_name

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.base.model import BaseModel
    from mergestream.experts.vector import TaskVector
    from mergestream.experts.vocabulary import Vocab
    from mergestream.merging.interference import Interference
    from mergestream.merging.plan import StepFiles
    from mergestream.store.directory import StoreDirectory

LARGE = 5.0
"""An expert whose norm is this many times the others' mean deserves a warning: it would drown them."""


@dataclass(frozen=True)
class Candidate:
    """A step that is written but does not count yet: what a review accepts or refuses."""

    store: StoreDirectory
    """As it is without it"""
    expert: Expert
    """Its entry in the history to be"""
    sketch: Tensor

    def cosines(self) -> dict[str, float | None]:
        """To each expert in the store, by name."""
        return cosines_to(self.store.place, self.store.history, self.sketch)

    def snapshot(self) -> Snapshot:
        """The store as it would be with it."""
        manifest = self.store.manifest.with_expert(self.expert)
        return Snapshot.open(self.store.place, manifest)


Review = Callable[[Candidate], Expert]
"""Accepts a candidate and returns its entry, with what was found; refuses it by raising a MergestreamError."""


class Arrival:
    """One model, checked against the store by its headers; ``absorb`` does the work, with a writer or for the facts."""

    def __init__(
        self,
        store: StoreDirectory,
        expert: ExpertSource,
        partial: bool,
        ignore: Sequence[str],
        measured: bool,
        name: str | None = None,
        withdrawn: str | None = None,
        vocab: Vocab | None = None,
        heads: Sequence[str] = (),
    ) -> None:
        """``measured``: the distance to the base is wanted, even where the method's scale does not need it;
        ``withdrawn``: the model is to be taken out of the state, where it has this name; ``heads``: what is kept with
        each expert from now on."""
        self.store = store
        self._given = "" if isinstance(expert, Mapping) else str(expert)
        self.options: Options = {"partial": partial, "ignore": list(ignore)}
        if vocab is not None:
            self.options["vocab"] = vocab
        self.t = store.manifest.step + 1
        self.number, self.mark = store.manifest.next_number, store.place.new_mark()
        self.folder = folder_name(self.number, self.mark)
        self.outcomes: dict[str, Outcome] = {}
        self.digests: dict[str, str] = {}
        self.notes: list[str] = []
        self._measured, self._withdrawn = measured, withdrawn is not None
        self._files = ExitStack()
        try:
            model = store.manifest.base.with_heads(heads)
            self.vector = self._open(expert, model, partial=partial, ignore=ignore, vocab=vocab)
            self.name = withdrawn or store.free_name(name, self.source)
            absorbs = store.history and not store.method.remembers_experts
            self.before = self._files.enter_context(store.snapshot()) if absorbs else None
        except BaseException:
            self._files.close()
            raise
        tensors = self.vector.model.tensors
        self.sketch = Sketch({name: tensors[name] for name in self.vector.names})

    def __enter__(self) -> Arrival:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    @property
    def source(self) -> str:
        return self.vector.expert.source

    @property
    def digest(self) -> str:
        return combined_digest(self.digests)

    @property
    def duplicate_of(self) -> str | None:
        return next((entry.name for entry in self.store.history if entry.digest == self.digest), None)

    @cached_property
    def totals(self) -> Totals:
        return total(self.store.method, self.t, self.mean_norm_before, self.outcomes.values())

    @property
    def mean_norm_before(self) -> float:
        return self.store.history[-1].mean_norm if self.store.history else 0.0

    @property
    def cut(self) -> int:
        """In a ledger: how many experts its entry leaves room for."""
        return max(self.t, FEWEST) if self.store.method.remembers_experts else 0

    @property
    def rank(self) -> int:
        """The largest that a tensor in factors may have now; in a ledger, of the expert's own factors."""
        return max((plan.rank for plan in self.step.plans.values()), default=0)

    @property
    def fates(self) -> dict[str, int]:
        """How many tensors were merged, copied, kept as a head, tied, unchanged, ignored."""
        return dict(sorted(Counter(self.vector.actions.values()).items()))

    def _open(self, expert: ExpertSource, model: BaseModel, **options: Any) -> TaskVector:
        store, opened = self.store, open_expert(expert)
        self._files.callback(opened.close)
        base: Checkpoint
        if not model.measured and isinstance(opened, Adapter) and not opened.whole:
            base = ConfigOnlyBase(model.source, None, model.tensors)
        else:
            base = self._files.enter_context(store.open_base())
            if not model.measured:  # from now on it must stay what it is
                model = model.with_weights(base, store.engine, store.progress)
        if isinstance(opened, Adapter) and not store.method.factored:
            self.note(f"{store.method.name} needs dense tensors: the adapter is multiplied out, one by one")
        vector = make_task_vector(model, base, opened, **options)
        for sentence in vector.notes:
            self.note(sentence)
        return vector

    @cached_property
    def step(self) -> Step:
        return Step(
            method=self.store.method,
            vector=self.vector,
            expert=self.name,
            absorbed=self.t - 1,
            state=self.before.state if self.before else None,
            device=self.store.engine.device,
            max_rank=self.store.manifest.max_rank,
            sketch=None if self._withdrawn else self.sketch,
            measure_direction=self._measured,
            subtract=self._withdrawn,
        )

    @cached_property
    def layout(self) -> dict[str, TensorSpec]:
        """The tensors of the new state: dense slots, and the cores of those in factors."""
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
        """What the step may add to the bases of the slots in factors."""
        layout: dict[str, TensorSpec] = {}
        for name, plan in self.step.plans.items():
            if plan.bounds:
                layout |= block_layout(plan.bounds, self.vector.model.tensors[name].state_dtype, name)
        return layout

    def writer(self) -> StepWriter:
        """Begin the new step on disk, or resume one that was cut short."""
        plan = {
            "source": self.source,
            "name": self.name,
            "fingerprint": self.vector.expert.fingerprint,
            "after": None if self.cut else [entry.digest for entry in self.store.history],
            "cut": self.cut,
            "commit": self.store.manifest.commit,
            "measured": self.step.measures_direction,
            "withdrawn": self._withdrawn,
            **self.options,
        }
        before = self.before.state if self.before else None
        return StepWriter(self.store.place, self.folder, plan, layout=self.layout, blocks=self.blocks, before=before)

    def absorb(self, writer: StepWriter | None = None, memory: StateWriter | None = None) -> None:
        """Absorb every tensor; without a writer only to know the outcome, and what ``memory`` keeps of the state."""
        engine, vector = self.store.engine, self.vector
        done = writer.done if writer else {}
        self.outcomes = {name: outcome for name, (outcome, _) in done.items()}
        waiting = sum(vector.numel(name) for name in vector.names if name not in done)
        doing = "withdrawing" if self._withdrawn else "absorbing" if writer else "inspecting"
        label = f"{doing} {Path(self.source).name}"
        with self.store.progress.task(label, 4 * waiting) as advance:
            for name, outcome in self.step.run(engine, writer or memory or Discard(), done=done):
                self.outcomes[name] = outcome
                if writer:
                    writer.record(name, outcome, vector.digests.get(name))
                advance(4 * vector.numel(name))
        sizes = {name: vector.numel(name) for name in done}
        if self.step.sketch:
            list(engine.run(sizes, lambda name: self.sketch.add_elements(name, vector.elements(name))))
        for name in vector.heads:
            vector.head(name)
        earlier = {name: digest for name, (_, digest) in done.items() if digest is not None}
        self.digests = {**earlier, **vector.digests}

    def finish(self, writer: StepWriter, started: float) -> Candidate:
        """Bring the step and what is remembered of the expert to the disk; it does not count before the commit."""
        totals, sketch = self.totals, self.sketch.values()
        entry = Expert(
            name=self.name,
            number=self.number,
            mark=self.mark,
            source=self.source,
            digest=self.digest,
            added=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - started, 3),
            distance=totals.distance,
            rank=self.rank,
            state=writer.finish(self.outcomes),
            record=write_record(self.store.place, self.folder, self, sketch),
            fates=self.fates,
            options=self._options_needed,
            cut=self.cut,
            notes=self.notes,
            given=self._given,
            **{key: value for key, value in vars(totals).items() if key != "t"},
        )
        return Candidate(self.store, entry, sketch)

    @property
    def _options_needed(self) -> Options:
        """Those that were given, and what had to be allowed."""
        options: Options = {**self.options}
        if self.duplicate_of is not None or self.totals.norm == 0:
            options["allow_duplicate"] = True
        if self.base_check.is_other:
            options["allow_other_base"] = True
        return options

    def finish_withdrawal(self, writer: StepWriter, last: Expert) -> Expert:
        """The last of the experts that stay, with the state without the one that was withdrawn."""
        copy_record(self.store.place, last.folder, self.folder)
        return dataclasses.replace(last, number=self.number, mark=self.mark, state=writer.finish(self.outcomes))

    def refuse_duplicate(self) -> None:
        if self.duplicate_of is not None:
            raise MergestreamError(
                f"{self.source} has been absorbed already, as {self.duplicate_of}; "
                "pass --allow-duplicate to add it once more"
            )
        if self.totals.norm == 0:
            raise MergestreamError(
                f"{self.source} is identical to the base; pass --allow-duplicate to add it all the same"
            )

    @cached_property
    def base_check(self) -> BaseCheck:
        return check_base(self.vector, {name: outcome.norm2 for name, outcome in self.outcomes.items()})

    def refuse_other_base(self) -> None:
        if self.base_check.is_other:
            raise MergestreamError(f"{self.base_check.note}; pass --allow-other-base to add it all the same")

    def interference(self, entry: StepFiles) -> Interference | None:
        """How the experts of a ledger would interfere with this one, the last of them."""
        store, totals = self.store, self.totals
        norms = totals.norm, totals.mean_norm, totals.direction_norm
        new = KeptExpert(self.name, *norms, self.cut, bool(self.rank), entry)
        with ExitStack() as opened:
            known = opened.enter_context(store.snapshot()).kept if store.history else []
            reading = read_out(self.vector.model, store.method, [*known, new], Selection(), store.engine)
            return reading.interference(store.engine, store.progress)

    def note(self, sentence: str) -> None:
        """Tell the user now, and keep it for the history, as text that can be kept: there are others' names in it."""
        self.notes.append(one_line(sentence, MAX_SENTENCE))
        self.store.progress.note(self.notes[-1])

    def note_oddities(self) -> None:
        """Tell of a model that is not what it was, whose base is another one, or not known, or that outweighs all
        others."""
        for note in (self.vector.expert.note, self.base_check.note):
            if note:
                self.note(note)
        mean = self.mean_norm_before
        if mean and self.totals.norm >= LARGE * mean:
            self.note(
                f"{self.source} has moved {self.totals.norm / mean:.1f} times as far as the experts before it "
                "in the mean and outweighs them"
            )
