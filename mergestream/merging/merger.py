"""Continual merging in memory: the same steps as a store's, on state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mergestream.algebra.lowrank import LowRank
from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint, torch_dtype
from mergestream.engine import Engine, LocalEngine
from mergestream.experts.vector import TaskVector
from mergestream.merging.readout import Readout
from mergestream.merging.step import Step, Totals, no_state, total
from mergestream.methods.base import Method
from mergestream.methods.opcm import OPCM


class _State(dict[tuple[str, str], Tensor]):
    """Slots in memory, by slot and tensor name."""

    def __init__(self, step: Step) -> None:
        for name in step.names:
            for slot, form in step.method.layout(step.context(name, step.counts[-1])).items():
                self[slot, name] = torch.empty(form.shape, dtype=form.dtype)

    def read(self, slot: str, name: str) -> Tensor:
        return self[slot, name]

    def write(self, slot: str, name: str, start: int, piece: Tensor) -> None:
        self[slot, name].view(-1)[start : start + piece.numel()] = piece

    def write_factors(self, name: str, state: Mapping[str, LowRank]) -> dict[str, Any]:
        raise NotImplementedError("state dicts are dense")


class Merger:
    """Merges state dicts one by one::

    merger = Merger(base.state_dict(), OPCM(alpha=0.5))
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
        self.method = method or OPCM()
        self.history: list[Totals] = []
        self._base = open_checkpoint(base)
        self._model = BaseModel.examine(self._base)
        self._engine = engine or (LocalEngine() if workers is None else LocalEngine(workers))
        self._state: _State | None = None

    def add(self, expert: Mapping[str, Tensor]) -> Totals:
        """Absorb the next model; returns the norms and λ after it."""
        vector = TaskVector(self._model, self._base, open_checkpoint(expert))
        read_state = no_state if self._state is None else self._state.read
        step = Step(self.method, [vector], len(self.history), read_state, self._engine.device)
        state = _State(step)
        outcomes = dict(step.run(self._engine, state))
        mean_norm = self.history[-1].mean_norm if self.history else 0.0
        totals = total(self.method, step.counts[-1], mean_norm, outcomes.values())
        self._state = state
        self.history.append(totals)
        return totals

    def state_dict(self, scale: str | float | None = None) -> dict[str, Tensor]:
        """The merged model, in the base's dtypes; tied tensors stay one tensor.

        ``scale`` is the method's own by default, else ``adaptive``, ``sqrt``, ``mean`` or a number.
        """
        if self._state is None:
            return {name: self._base.read(name) for name in self._model.tensors}
        totals, engine = self.history[-1], self._engine
        readout = Readout(self._model, self.method, totals.t, self._state.read, engine.device)
        factor = readout.scale(scale, totals.mean_norm, totals.direction_norm, engine)

        def merge(name: str) -> Tensor:
            tensor = self._model.tensors[name]
            merged = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
            for start, piece in readout.pieces(name, self._base, factor, tensor.dtype):
                merged.view(-1)[start : start + piece.numel()] = piece
            return merged

        stored = {name: tensor.numel for name, tensor in self._model.tensors.items() if tensor.tied_to is None}
        merged = dict(engine.run(stored, merge, readout.memory))
        return {name: merged[tensor.tied_to or name] for name, tensor in self._model.tensors.items()}
