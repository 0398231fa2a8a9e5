"""Continual merging in memory: the same steps as a store's, on state dicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mergestream.algebra.lowrank import LowRank
from mergestream.base.model import BaseModel
from mergestream.checkpoints import TensorSpec, open_checkpoint, torch_dtype
from mergestream.checkpoints.reader import Source
from mergestream.engine import Engine, LocalEngine
from mergestream.errors import UsageError
from mergestream.experts import make_task_vector
from mergestream.ledger.selection import Selection
from mergestream.merging.entries import read_out
from mergestream.merging.plan import KeptExpert
from mergestream.merging.reading import Reading
from mergestream.merging.step import Step, Totals, total
from mergestream.methods import as_method, method_text
from mergestream.methods.base import Method, State
from mergestream.progress import Progress, default_progress
from mergestream.sizes import counted


class MemoryState(dict[tuple[str, str], Tensor]):
    """What one step has written, in memory: tensors by slot and name."""

    def __init__(self, step: Step, spare: Mapping[tuple[str, str], Tensor] | None = None) -> None:
        """Reuse ``spare`` memory where it fits: the kernel clears every new page."""
        self._slots = {name: tuple(plan.layout) for name, plan in step.plans.items()}
        for name, plan in step.plans.items():
            for slot, form in plan.layout.items():
                memory = (spare or {}).get((slot, name))
                if memory is None or (tuple(memory.shape), memory.dtype) != (form.shape, form.dtype):
                    memory = torch.empty(form.shape, dtype=form.dtype)
                self[slot, name] = memory

    def memory(self, name: str) -> int:
        return 0

    def ranks(self, name: str) -> None:
        """State dicts are dense."""

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        return {slot: tuple(self[slot, name].shape) for slot in self._slots.get(name, ())}

    def read(self, name: str, only: Collection[str] | None = None) -> State:
        return {slot: self[slot, name] for slot in self._slots[name] if only is None or slot in only}

    def write(self, name: str, start: int, slots: Mapping[str, Tensor]) -> None:
        for slot, piece in slots.items():
            self[slot, name].view(-1)[start : start + piece.numel()] = piece.reshape(-1)

    def write_factors(self, name: str, state: Mapping[str, LowRank]) -> dict[str, Any]:
        raise NotImplementedError("state dicts are dense")

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError("a merge in memory is seen by this process only: use the local engine, or a store")


class Merger:
    """Merges experts one by one, in memory.

    ```python
    merger = Merger(base)
    merger.add(expert)
    base.load_state_dict(merger.state_dict())
    ```
    """

    def __init__(
        self,
        base: Source,
        method: Method | str | None = None,
        *,
        workers: int | None = None,
        engine: Engine | None = None,
        progress: Progress | None = None,
    ) -> None:
        """``base`` is a torch module, a state dict, a path or a hub id; a model in memory is not copied,
        and must not change. ``method`` is one, such as `OPCM`, or its name (the ledger by default)."""
        self.method = as_method(method)
        self.history: list[Totals] = []
        self.names: list[str] = []
        self._base = open_checkpoint(base)
        self._model = BaseModel.examine(self._base)
        self._engine = engine or (LocalEngine() if workers is None else LocalEngine(workers))
        self._progress = progress or default_progress()
        self._states: list[MemoryState] = []
        """The state after the last expert, or the entry of every expert"""
        self._spare: MemoryState | None = None
        """The memory of an earlier state, reused for the next one"""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """The base's names, shapes and types."""
        return self._model.tensors

    def __repr__(self) -> str:
        experts, method = counted(len(self.names), "expert"), method_text(self.method.name, self.method.parameters)
        return f"<Merger: {experts} merged by {method}, base of {counted(len(self.tensors), 'tensor')}>"

    def add(
        self,
        expert: Source,
        name: str | None = None,
        *,
        ignore: Sequence[str] = (),
        vocab: Literal["base"] | None = None,
    ) -> Totals:
        """Absorb the next expert; returns the norms and the scale after it. Without a name it is called by its number.

        ``ignore`` are globs of tensors that are left out, such as the head of a task; ``vocab="base"`` leaves out the
        rows of tokens that the base has not.
        """
        if vocab not in (None, "base"):
            raise UsageError(f"vocab={vocab}: a Merger keeps no tokens; 'base' leaves them out, and a store keeps them")
        name = name or str(len(self.names) + 1)
        if name in self.names:
            raise UsageError(f"an expert named {name} has been absorbed already; choose another name")
        vector = make_task_vector(self._model, self._base, open_checkpoint(expert), ignore=ignore, vocab=vocab)
        for sentence in vector.notes:
            Progress().note(sentence)
        is_entry = self.method.keeps_entries
        state_before = self._states[-1] if self._states and not is_entry else None
        step = Step(
            method=self.method,
            vector=vector,
            expert=name,
            absorbed=len(self.history),
            state=state_before,
            wanted_ranks=self._reading(Selection()).wanted_ranks if is_entry and self.history else {},
            device=self._engine.device,
        )
        state, self._spare = MemoryState(step, self._spare), None
        outcomes = {}
        size = sum(self._model.tensors[tensor].numel for tensor in vector.names)
        with self._progress.task(f"absorbing {name}", size) as advance:
            for tensor, outcome in step.run(self._engine, state):
                outcomes[tensor] = outcome
                advance(self._model.tensors[tensor].numel)
        mean_norm = self.history[-1].mean_norm if self.history else 0.0
        totals = total(self.method, step.t, mean_norm, outcomes.values())
        if state_before is not None:  # the new state replaces it
            self._spare = self._states.pop()
        self._states.append(state)
        self.history.append(totals)
        self.names.append(name)
        return totals

    def state_dict(
        self,
        scale: str | float | None = None,
        *,
        readout: str | None = None,
        only: Sequence[str] = (),
        without: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
    ) -> dict[str, Tensor]:
        """The merged model, in the base's dtypes; tied tensors stay one tensor.

        ``scale`` is the readout's own by default, else ``adaptive``, ``sqrt``, ``mean`` or a number. The others are
        as in `Store.export`.
        """
        if not self.history:
            return {name: self._base.read(name) for name in self._model.tensors}
        engine, reading = self._engine, self._reading(Selection(readout, only, without, weights or {}))
        factor = reading.scale(scale, engine)

        def merge(name: str) -> Tensor:
            tensor = self._model.tensors[name]
            merged = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
            for start, piece in reading.pieces(name, self._base, factor, tensor.dtype):
                merged.view(-1)[start : start + piece.numel()] = piece
            return merged

        stored = {name: tensor.numel for name, tensor in self._model.tensors.items() if tensor.tied_to is None}
        merged = dict(engine.run(stored, merge, reading.memory))
        return {name: merged[tensor.tied_to or name] for name, tensor in self._model.tensors.items()}

    def _reading(self, selection: Selection) -> Reading:
        first = len(self.history) - len(self._states)
        kept = [
            KeptExpert(name, totals.norm, totals.mean_norm, totals.direction_norm, totals.t, False, state)
            for name, totals, state in zip(self.names[first:], self.history[first:], self._states, strict=True)
        ]
        return read_out(self._model, self.method, len(self.history), kept, selection, self._engine.device)
