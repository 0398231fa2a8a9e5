"""A model that has arrived at a store: everything from its files to the outcome of absorbing it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mergestream.algebra.bounds import Room
from mergestream.base.skeleton import Skeleton
from mergestream.checkpoints import Checkpoint, TensorSpec
from mergestream.digest import combined_digest
from mergestream.errors import MergestreamError
from mergestream.experts.adapters import Adapter, same_model
from mergestream.experts.opening import ExpertSource, open_expert, task_vector
from mergestream.experts.sketch import Sketch
from mergestream.merging.step import Discard, Outcome, Step, Totals, memory_of, thresholds, total
from mergestream.report.diagnostics import LARGE
from mergestream.store.factors import block_layout, core_layout
from mergestream.store.steps import StepWriter, slot_name

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank
    from mergestream.experts.vector import TaskVector
    from mergestream.store.store import Store

OTHER_BASE = 0.7
"""Two unrelated models are about 1.4 apart, relative to their norm; fine-tuning moves 0.1 at most."""


class Arrival:
    """One model, checked against the store by its headers; ``absorb`` does the work, with a writer or for the facts."""

    def __init__(self, store: Store, expert: ExpertSource, *, partial: bool, ignore: Sequence[str]) -> None:
        self.store = store
        self.options: dict[str, Any] = {"partial": partial, "ignore": list(ignore)}
        self.t = store.manifest.step + 1
        self.outcomes: dict[str, Outcome] = {}
        self.digests: dict[str, str] = {}
        self._files = ExitStack()
        try:
            self.vector = self._open(expert, partial, ignore)
            self.before = self._files.enter_context(closing(store.open_step())) if store.history else None
        except BaseException:
            self._files.close()
            raise
        tensors = self.vector.model.tensors
        self.sketch = Sketch({name: tensor for name, tensor in tensors.items() if tensor.merges})

    def __enter__(self) -> Arrival:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._files.close()

    @property
    def source(self) -> str:
        return self.vector.expert.source

    @property
    def digest(self) -> str:
        return combined_digest(self.digests)

    @cached_property
    def totals(self) -> Totals:
        return total(self.store.method, self.t, self.mean_norm_before, self.outcomes)

    @property
    def mean_norm_before(self) -> float:
        return self.store.history[-1].mean_norm if self.store.history else 0.0

    def _open(self, expert: ExpertSource, partial: bool, ignore: Sequence[str]) -> TaskVector:
        store, model = self.store, self.store.manifest.base
        opened = open_expert(expert)
        self._files.callback(opened.close)
        base: Checkpoint
        if not model.measured and isinstance(opened, Adapter) and not opened.whole:
            base = Skeleton(model.source, None, model.tensors)
        else:
            base = self._files.enter_context(store.open_base())
            if not model.measured:  # from now on it must stay what it is
                model = model.with_weights(base, store.engine, store.progress)
        if isinstance(opened, Adapter):
            self._note_on_adapter(opened)
        return task_vector(model, base, opened, partial=partial, ignore=ignore)

    @cached_property
    def rooms(self) -> dict[str, Room]:
        """The tensors whose state is in factors and stays so, with the space that they may take.

        A tensor leaves them for good when a dense task vector comes, when the method needs it dense,
        or when its factors would take as much as the dense tensor.
        """
        rooms: dict[str, Room] = {}
        method, before = self.store.method, self.before
        if not method.factored:
            return rooms
        for name in self.vector.names:
            rank = self.vector.rank(name)
            keys = [slot_name(slot, name) for slot in method.slots(self.t - 1)] if before else []
            if rank is None or (before and not all(key in before.factors.index for key in keys)):
                continue
            ranks = [before.factors.ranks(key) for key in keys] if before else []
            room = Room.after(self.vector.model.tensors[name].shape, ranks, rank, self.store.manifest.max_rank)
            if room is not None:
                rooms[name] = room
        return rooms

    @cached_property
    def layout(self) -> dict[str, TensorSpec]:
        """The tensors of the new state: dense slots, and the cores of those in factors."""
        layout: dict[str, TensorSpec] = {}
        for name in self.vector.names:
            tensor = self.vector.model.tensors[name]
            for slot in self.store.method.slots(self.t):
                key = slot_name(slot, name)
                dense = {key: TensorSpec(tensor.state_dtype, tensor.shape)}
                layout |= core_layout(self.rooms[name], key) if name in self.rooms else dense
        return layout

    @cached_property
    def blocks(self) -> dict[str, TensorSpec]:
        """What the step may add to the bases of the slots in factors."""
        layout: dict[str, TensorSpec] = {}
        for name, room in self.rooms.items():
            tensor = self.vector.model.tensors[name]
            layout |= block_layout(room, TensorSpec(tensor.state_dtype, tensor.shape), name)
        return layout

    def writer(self) -> StepWriter:
        """Begin the new step on disk, or go on with one that was cut short."""
        plan = {
            "source": self.source,
            "fingerprint": self.vector.expert.fingerprint,
            "after": [entry.digest for entry in self.store.history],
            **self.options,
        }
        return StepWriter(self.store.path, self.t, self.layout, self.blocks, self.before, plan)

    def absorb(self, writer: StepWriter | None = None) -> None:
        """Absorb every tensor; without a writer only to know the outcome."""
        engine, vector = self.store.engine, self.vector
        step = Step(
            self.store.method,
            self.t,
            vector,
            self._read_state,
            engine.device,
            self.rooms,
            self.store.manifest.max_rank,
            self.sketch,
        )
        done = writer.done if writer else {}
        self.outcomes = {name: outcome for name, (outcome, _) in done.items()}
        costs = {name: vector.numel(name) for name in vector.names if name not in done}
        ranked = thresholds([step], engine) if costs else None
        target = writer or Discard()
        label = f"{'absorbing' if writer else 'inspecting'} {Path(self.source).name}"
        with self.store.progress.task(label, sum(costs.values()) * 4) as advance:
            for name, outcome in engine.run(
                costs,
                lambda name: step.absorb(name, ranked(name)[0] if ranked else {}, target),
                self.memory,
            ):
                self.outcomes[name] = outcome
                if writer:
                    writer.record(name, outcome, vector.digests.get(name))
                advance(costs[name] * 4)
        sizes = {name: vector.numel(name) for name in done}
        for _ in engine.run(sizes, lambda name: self.sketch.add_elements(name, vector.elements(name))):
            pass
        for name in vector.heads:
            vector.head(name)
        earlier = {name: digest for name, (_, digest) in done.items() if digest is not None}
        self.digests = {**earlier, **vector.digests}

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of RAM that each tensor takes at its peak."""
        return memory_of(self.store.method, self.vector, self.rooms)

    def _read_state(self, slot: str, name: str) -> Tensor | LowRank:
        assert self.before is not None
        return self.before.read(slot, name)

    def refuse_duplicate(self) -> None:
        for entry in self.store.history:
            if entry.digest == self.digest:
                raise MergestreamError(
                    f"{self.source} has been absorbed already, as {entry.name}; "
                    "pass --allow-duplicate to add it once more"
                )
        if self.totals.norm == 0:
            raise MergestreamError(
                f"{self.source} is identical to the base; pass --allow-duplicate to add it all the same"
            )

    def note_oddities(self) -> None:
        """Tell of a model that was not made from this base, or that outweighs all others."""
        tensors, note = self.vector.model.tensors, self.store.progress.note
        matrices = [name for name in self.outcomes if len(tensors[name].shape) >= 2 and tensors[name].norm]
        distances = [math.sqrt(self.outcomes[name].norm2) / tensors[name].norm for name in matrices]
        if distances and min(distances) > OTHER_BASE:
            norm = math.sqrt(math.fsum(tensor.norm**2 for tensor in tensors.values()))
            note(
                f"{self.source} was probably not fine-tuned from this base: not one matrix is close, "
                f"the relative distance is {self.totals.norm / norm:.2f}; take it back with undo"
            )
        mean = self.mean_norm_before
        if mean and self.totals.norm >= LARGE * mean:
            note(
                f"{self.source} has moved {self.totals.norm / mean:.1f} times as far as the experts before it "
                "in the mean and outweighs them; take it back with undo if that is not meant"
            )

    def _note_on_adapter(self, adapter: Adapter) -> None:
        named, base, method = adapter.config.base, self.store.manifest.base.source, self.store.method
        if named is not None and not same_model(named, base):
            self.store.progress.note(
                f"{adapter.source} says that it was made for {named}, and the base of this store is "
                f"{base}; take it back with undo if they are not the same model"
            )
        if not method.factored:
            self.store.progress.note(f"{method.name} needs dense tensors: the adapter is multiplied out, one by one")
