"""Continual merging in memory: the same steps as a store's, on state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mergestream.algebra.lowrank import LowRank
from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint, torch_dtype
from mergestream.engine import LocalEngine
from mergestream.experts.vector import TaskVector
from mergestream.merging.readout import Readout
from mergestream.merging.step import Step, Totals, thresholds, total
from mergestream.methods import OPCM
from mergestream.methods.base import Method


class _State(dict[tuple[str, str], Tensor]):
    """Slots in memory, by slot and tensor name."""

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

    def __init__(self, base: Mapping[str, Tensor], method: Method | None = None, *, workers: int | None = None) -> None:
        self.method = method or OPCM()
        self.history: list[Totals] = []
        self._base = open_checkpoint(base)
        self._model = BaseModel.examine(self._base)
        self._engine = LocalEngine() if workers is None else LocalEngine(workers)
        self._state = _State()

    def add(self, expert: Mapping[str, Tensor]) -> Totals:
        """Absorb the next model; returns the norms and λ after it."""
        t = len(self.history) + 1
        vector = TaskVector(self._model, self._base, open_checkpoint(expert))
        step = Step(self.method, t, vector, lambda slot, name: self._state[slot, name])
        state = _State()
        for name in vector.names:
            tensor = self._model.tensors[name]
            for slot in self.method.slots(t):
                state[slot, name] = torch.empty(tensor.shape, dtype=torch_dtype(tensor.state_dtype))
        ranked = thresholds([step], self._engine)
        costs = {name: vector.numel(name) for name in vector.names}
        outcomes = dict(self._engine.run(costs, lambda name: step.absorb(name, ranked(name)[0], state)))
        totals = total(self.method, t, self.history[-1].mean_norm if self.history else 0.0, outcomes)
        self._state = state
        self.history.append(totals)
        return totals

    def state_dict(self) -> dict[str, Tensor]:
        """The merged model, in the base's dtypes; tied tensors stay one tensor."""
        if not self.history:
            return {name: self._base.read(name) for name in self._model.tensors}
        totals = self.history[-1]
        readout = Readout(
            self._model,
            self._base,
            self.method,
            totals.t,
            totals.scale,
            lambda slot, name: self._state[slot, name],
        )
        stored = {name: tensor for name, tensor in self._model.tensors.items() if tensor.tied_to is None}
        merged = {}
        for name, tensor in stored.items():
            merged[name] = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
            for start, piece in readout.pieces(name, tensor.dtype):
                merged[name].view(-1)[start : start + piece.numel()] = piece
        return {name: merged[tensor.tied_to or name] for name, tensor in self._model.tensors.items()}
