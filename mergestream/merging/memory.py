"""What a store or a `Merger` keeps of its experts, and how it becomes a `Reading`.

An accumulator keeps one state that has absorbed all experts. A ledger keeps one entry per expert. `read_out` is the
place that decides between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mergestream.base.model import BaseModel
from mergestream.engine import Engine
from mergestream.ledger.method import Ledger
from mergestream.ledger.selection import Selection
from mergestream.merging.entries import EntriesReading, WeightedExpert
from mergestream.merging.plan import InputFiles, StepFiles
from mergestream.merging.reading import Reading, StateReading
from mergestream.methods.base import Method


@dataclass(frozen=True)
class KeptExpert:
    """One expert of a store or a `Merger`, with the scalars after its step."""

    name: str
    norm: float
    mean_norm: float
    direction_norm: float | None
    cut: int
    """For how many experts its entry was written"""
    is_adapter: bool
    files: StepFiles | None
    """The expert's entry, or the state after it; None where the state is no longer needed"""
    inputs: InputFiles | None = None
    """What is known of the expert's inputs"""


def read_out(
    model: BaseModel,
    method: Method,
    kept: Sequence[KeptExpert],
    selection: Selection,
    engine: Engine,
) -> Reading:
    """The merged model of these experts, as the user has selected it."""
    last = kept[-1]
    if not isinstance(method, Ledger):
        assert last.files is not None
        readout, norms = selection.of_state(method), (last.mean_norm, last.direction_norm)
        return StateReading(model, method, len(kept), last.files, *norms, engine.device, readout)
    adapters = [expert.name for expert in kept if expert.is_adapter]
    chosen, weights = selection.of_entries([expert.name for expert in kept], adapters)
    experts = [
        WeightedExpert(
            expert.name,
            weights[expert.name],
            expert.cut,
            expert.norm,
            expert.files,
            expert.is_adapter,
            expert.inputs,
        )
        for expert in kept
        if expert.name in weights and expert.files is not None
    ]
    return EntriesReading(model, method, chosen, experts, engine.device)
