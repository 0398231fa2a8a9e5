"""Continual merging in memory: the same steps as a store's, on state dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mergestream.algebra.lowrank import LowRank
from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint, torch_dtype
from mergestream.engine import Engine, LocalEngine
from mergestream.errors import UsageError
from mergestream.experts.vector import TaskVector
from mergestream.ledger.method import Ledger
from mergestream.ledger.selection import Selection
from mergestream.merging.reading import EntriesReading, Reading, StateReading, Voice
from mergestream.merging.step import Step, Totals, no_state, total
from mergestream.methods.base import Method
from mergestream.progress import Progress


class MemoryState(dict[tuple[str, str], Tensor]):
    """Slots in memory, by slot and tensor name."""

    def __init__(self, step: Step) -> None:
        self._slots = {name: step.method.layout(step.context(name, step.counts[-1])) for name in step.names}
        for name, layout in self._slots.items():
            for slot, form in layout.items():
                self[slot, name] = torch.empty(form.shape, dtype=form.dtype)

    def read(self, slot: str, name: str) -> Tensor:
        return self[slot, name]

    def entry(self, name: str) -> dict[str, Tensor]:
        """All slots of a tensor."""
        return {slot: self[slot, name] for slot in self._slots[name]}

    def write(self, slot: str, name: str, start: int, piece: Tensor) -> None:
        self[slot, name].view(-1)[start : start + piece.numel()] = piece

    def write_factors(self, name: str, state: Mapping[str, LowRank]) -> dict[str, Any]:
        raise NotImplementedError("state dicts are dense")


class Merger:
    """Merges state dicts one by one::

    merger = Merger(base.state_dict())
    merger.add(expert.state_dict())
    base.load_state_dict(merger.state_dict())
    """

    def __init__(
        self,
        base: Mapping[str, Tensor],
        method: Method | None = None,
        *,
        workers: int | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.method = method or Ledger()
        self.history: list[Totals] = []
        self.names: list[str] = []
        self._base = open_checkpoint(base)
        self._model = BaseModel.examine(self._base)
        self._engine = engine or (LocalEngine() if workers is None else LocalEngine(workers))
        self._states: list[MemoryState] = []
        """That after the last model, or the entry of every one"""

    def add(self, expert: Mapping[str, Tensor], name: str | None = None) -> Totals:
        """Absorb the next model, called by its number if it has no name; returns the norms and the scale after it."""
        name = name or str(len(self.names) + 1)
        if name in self.names:
            raise UsageError(f"an expert named {name} has been absorbed already; choose another name")
        vector = TaskVector(self._model, self._base, open_checkpoint(expert))
        read_state = self._states[-1].read if self._states else no_state
        before, device = len(self.history), self._engine.device
        step = Step(self.method, [vector], before, read_state, device, experts=[name])
        state = MemoryState(step)
        outcomes = dict(step.run(self._engine, state))
        mean_norm = self.history[-1].mean_norm if self.history else 0.0
        totals = total(self.method, step.counts[-1], mean_norm, outcomes.values())
        self._states = [*self._states, state] if self.method.remembers_experts else [state]
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
        balance: bool = False,
    ) -> dict[str, Tensor]:
        """The merged model, in the base's dtypes; tied tensors stay one tensor.

        ``scale`` is the readout's own by default, else ``adaptive``, ``sqrt``, ``mean`` or a number. The others are
        as in `Store.export`.
        """
        if not self.history:
            return {name: self._base.read(name) for name in self._model.tensors}
        engine, reading = self._engine, self._reading(Selection(readout, only, without, weights or {}, balance))
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
        last = self.history[-1]
        if not isinstance(self.method, Ledger):
            return StateReading(
                self._model,
                self.method,
                last.t,
                self._states[-1].read,
                last.mean_norm,
                last.direction_norm,
                self._engine.device,
                readout=selection.of_state(self.method),
            )
        readout, weights = selection.of_entries(self.names)
        voices = [
            Voice(name, weights[name], totals.t, totals.norm, state.entry)
            for name, totals, state in zip(self.names, self.history, self._states, strict=True)
            if name in weights
        ]
        reading = EntriesReading(self._model, self.method, readout, voices, self._engine.device)
        return reading.balanced(self._engine, Progress()) if selection.balance else reading
