"""What is merged does not depend on the size of the pieces in which it goes by: not a bit of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mergestream import (
    DARE,
    EMA,
    LAWA,
    METHODS,
    OPCM,
    SLERP,
    TIES,
    Average,
    Ledger,
    LocalEngine,
    MagMax,
    Merger,
    Method,
    ModelStock,
    TaskArithmetic,
    Weighted,
)
from mergestream.algebra import pieces, selection
from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from mergestream.experts.vector import TaskVector
from mergestream.merging.step import Totals
from mergestream.merging.thresholds import find_thresholds

StateDict = dict[str, Tensor]

NAMES = {
    "layers.0.q.weight": 2,
    "layers.0.up.weight": 2,
    "layers.0.experts.up": 3,
    "conv.weight": 4,
    "embed_tokens.weight": 2,
    "norm.weight": 1,
    "temperature": 0,
}
"""Tensors of every role, with their dimensions"""
METHOD_CASES = [
    Ledger(budget=8),
    Ledger(entries="float32"),
    OPCM(),
    OPCM(projection="paper", scaling="sqrt"),
    OPCM(projection="block"),
    Average(),
    TaskArithmetic(),
    TIES(),
    TIES(mode="reference", trim="tensor"),
    TIES(mode="streaming"),
    TIES(mode="streaming", trim="tensor", density=0.5),
    EMA(),
    LAWA(window=2),
    MagMax(),
    DARE(),
    ModelStock(),
    SLERP(),
    SLERP(t=0.2),
    Weighted(),
    Weighted(weights="0.5,-0.3,0.9", densities="0.3,1,0.01", elect=True, normalize=True, scale=0.7),
    Weighted(weights="0.5,0.3", densities="0.5", thin="random", normalize=True, rescale=True, seed=3),
    Weighted(weights="0.5", densities="0.4", thin="random", elect=True),
]


@st.composite
def models(draw: st.DrawFn) -> list[StateDict]:
    """A base of some of these tensors, in any shapes and types, and three experts."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtypes = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
    base: StateDict = {"position_ids": torch.arange(draw(st.integers(0, 9)))}
    for name in draw(st.lists(st.sampled_from(sorted(NAMES)), min_size=1, unique=True)):
        shape = draw(st.tuples(*[st.integers(0 if NAMES[name] == 1 else 1, 9)] * NAMES[name]))
        base[name] = torch.randn(shape, generator=generator).to(draw(dtypes))

    def expert(scale: float) -> StateDict:
        noise = {name: torch.randn(x.shape, generator=generator) * scale for name, x in base.items()}
        return {name: (x + noise[name]).to(x.dtype) if x.is_floating_point() else x for name, x in base.items()}

    return [base, expert(0.1), expert(0.4), expert(0.02)]


@contextmanager
def pieces_of(size: int) -> Iterator[None]:
    """Tensors go by in pieces of so many elements; thresholds are searched for, which small models never need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", size)
        patch.setattr(selection, "SMALLEST_SAMPLE", 4)
        patch.setattr(selection, "_BLOCK", 2)
        yield


def merged(models: list[StateDict], method: Method) -> tuple[StateDict, list[Totals]]:
    base, *experts = models
    merger = Merger(base, method, engine=LocalEngine(workers=1))
    for expert in experts:
        merger.add(expert)
    return merger.state_dict(), merger.history


def as_bytes(tensors: StateDict) -> dict[str, bytes]:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def test_every_method_is_drawn() -> None:
    assert {method.name for method in METHOD_CASES} == set(METHODS)


@pytest.mark.parametrize("method", METHOD_CASES, ids=str)
@settings(max_examples=12)
@given(models=models(), size=st.integers(1, 100))
def test_pieces_of_any_size_give_the_same_model(method: Any, models: Any, size: Any) -> None:
    expected, history = merged(models, method)
    with pieces_of(size):
        found, history_in_pieces = merged(models, method)
    assert as_bytes(found) == as_bytes(expected)
    assert history_in_pieces == history


@settings(max_examples=60)
@given(models(), st.integers(1, 100), st.floats(0, 1), st.sampled_from(["model", "tensor"]))
def test_thresholds_are_those_of_a_full_sort_in_pieces_of_any_size(
    models: Any, size: Any, density: Any, over: Any
) -> None:
    base, *experts = (open_checkpoint(model) for model in models)
    model = BaseModel.examine(base)
    method, vectors = TIES(mode="streaming", density=density, trim=over), [TaskVector(model, base, x) for x in experts]
    names = model.merged
    with pieces_of(size):
        thresholds = find_thresholds(method, vectors, range(1, len(vectors) + 1), None, LocalEngine(workers=1))
        found = {name: [place["delta"] for place in thresholds(name)] for name in names}
    for number, vector in enumerate(vectors):
        magnitudes = {name: vector.whole(name).reshape(-1).double().abs() for name in names}
        for name in names:
            ranked = torch.cat(list(magnitudes.values())) if over == "model" else magnitudes[name]
            count = int(density * len(ranked))
            expected = ranked.sort(descending=True).values[count - 1] if count else torch.inf
            assert found[name][number] == (expected if count < len(ranked) or not count else 0)
