"""‖x‖² is the same to the last bit however a tensor is cut, whatever is in it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mergestream.algebra.pieces import _BLOCK, _RUN, SquaredNorm, squared_norm

MAGNITUDES = (0.0, 1e-42, 1e-30, 1e-15, 1e-3, 1.0, 1e30)
"""Zero, a denormal number, squares that float32 rounds to zero or loses digits of, and squares beyond it."""
LENGTHS = st.one_of(
    st.integers(0, 3 * _RUN),
    st.sampled_from([_RUN - 1, _RUN, _BLOCK - 1, _BLOCK, _BLOCK + 1, 2 * _BLOCK]),
)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Stretches of different magnitudes, one after another."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    stretches = draw(st.lists(st.tuples(LENGTHS, st.sampled_from(MAGNITUDES)), max_size=6))
    parts = [torch.randn(length, generator=generator, dtype=torch.float64) * size for length, size in stretches]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts]).to(draw(DTYPES))


def cut(tensor: Tensor, places: list[float]) -> list[Tensor]:
    """The pieces between places that are given as shares of the length; some are empty."""
    ends = sorted(round(place * len(tensor)) for place in places)
    return [tensor[start:stop] for start, stop in pairwise([0, *ends, len(tensor)])]


def norm_of(pieces: list[Tensor]) -> SquaredNorm:
    norm = SquaredNorm()
    for piece in pieces:
        buffer = piece.clone()
        norm.add(buffer)
        buffer.fill_(math.nan)  # the memory of a piece is used again
    return norm


@settings(max_examples=150)
@given(tensors(), st.lists(st.floats(0, 1), max_size=12))
@example(torch.ones(2 * _BLOCK + _RUN + 1), [])
def test_any_cut_gives_the_same_bits(tensor: Any, places: Any) -> None:
    whole, pieces = squared_norm(tensor), norm_of(cut(tensor, places))
    assert pieces.total() == whole
    assert pieces.finite
    assert whole == pytest.approx(float(tensor.double().square().sum()), rel=1e-6, abs=0)


@settings(max_examples=50)
@given(tensors(), st.integers(1, 2 * _BLOCK))
def test_pieces_of_any_size_give_the_same_bits(tensor: Any, size: Any) -> None:
    size = max(size, len(tensor) // 100)
    assert norm_of(list(tensor.split(size))).total() == squared_norm(tensor)


@settings(max_examples=50)
@given(tensors(), st.floats(0, 1), st.sampled_from([math.nan, math.inf, -math.inf]), st.lists(st.floats(0, 1)))
def test_what_is_no_number_is_noticed_wherever_it_is(tensor: Any, place: Any, bad: Any, places: Any) -> None:
    if len(tensor):
        tensor[int(place * (len(tensor) - 1))] = bad
        norm = norm_of(cut(tensor, places))
        norm.total()
        assert not norm.finite
