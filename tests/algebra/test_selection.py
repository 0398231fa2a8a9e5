"""The k-th magnitude is exact, whatever the data looks like and wherever the sample looks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mergestream.algebra import selection
from mergestream.algebra.selection import Search, sample_ranges, sample_stride, tally

SIZES = (100_000, 1, 0, 70_001, 513)
"""Tensors of a model: together enough that only a sample of them is sorted at first."""


def kth(tensors: list[Tensor], count: int, piece: int = 4096) -> tuple[float, int]:
    """The k-th magnitude, and how often the data was passed over."""
    total = sum(map(len, tensors))
    ranges = ((tensor, *place) for tensor in tensors for place in sample_ranges(len(tensor), sample_stride(total)))
    search = Search(count, total, [tensor[start:stop].abs() for tensor, start, stop in ranges])
    passes = 0
    while search.found is None:
        passes += 1
        assert passes < 10, "it must come to an end"
        parts = (part for tensor in tensors for part in tensor.split(piece))
        search.narrow([tally(part.abs(), search.bracket) for part in parts])
    return search.found, passes


def normal(generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(size, generator=generator) for size in SIZES]


def in_bfloat16(generator: torch.Generator) -> list[Tensor]:
    return [(t * 1e-3).bfloat16().float() - 0.001 for t in normal(generator)]


def mostly_zero(generator: torch.Generator) -> list[Tensor]:
    return [t.where(t.abs() > 2, 0) for t in normal(generator)]


def constant(generator: torch.Generator) -> list[Tensor]:
    return [torch.full((size,), -0.5) for size in SIZES]


def two_values(generator: torch.Generator) -> list[Tensor]:
    return [t.sign() + 3 for t in normal(generator)]


def sorted_by_size(generator: torch.Generator) -> list[Tensor]:
    return [t.sort().values for t in normal(generator)]


def large_where_no_sample_looks(generator: torch.Generator) -> list[Tensor]:
    tensors = normal(generator)
    stride = sum(SIZES) // (1 << 15)
    for tensor in tensors:
        sampled = torch.zeros(len(tensor), dtype=torch.bool)
        for start, stop in sample_ranges(len(tensor), stride):
            sampled[start:stop] = True
        tensor[~sampled] *= 1000
    return tensors


def small_where_no_sample_looks(generator: torch.Generator) -> list[Tensor]:
    return [1 / t.where(t != 0, 1) for t in large_where_no_sample_looks(generator)]


KINDS = [
    normal,
    in_bfloat16,
    mostly_zero,
    constant,
    two_values,
    sorted_by_size,
    large_where_no_sample_looks,
    small_where_no_sample_looks,
]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_kth_of_the_sorted_magnitudes(kind: Any) -> None:
    tensors = kind(torch.Generator().manual_seed(1))
    descending = torch.cat(tensors).abs().sort(descending=True).values
    total = len(descending)
    for count in (1, 2, 17, total // 100, total // 5, total // 2, total - 2, total - 1):
        found, _ = kth(tensors, count)
        assert found == float(descending[count - 1]), count


def test_one_pass_is_enough_where_the_sample_is_fair() -> None:
    tensors = normal(torch.Generator().manual_seed(2))
    total = sum(SIZES)
    assert all(kth(tensors, count)[1] == 1 for count in (total // 100, total // 5, total // 2))


def test_all_and_nothing_need_no_pass() -> None:
    tensors = normal(torch.Generator().manual_seed(3))
    assert kth(tensors, 0) == (math.inf, 0)
    assert kth(tensors, sum(SIZES)) == (0.0, 0)


def test_small_models_are_sorted_at_once() -> None:
    tensors = [torch.tensor([3.0, -5.0, 1.0]), torch.tensor([-2.0])]
    assert [kth(tensors, count)[0] for count in (1, 2, 3)] == [5, 3, 2]


def test_data_that_is_no_number_comes_to_an_end() -> None:
    """It is refused when it is absorbed; until then the search must not go on for ever."""
    _, passes = kth([torch.full((size,), math.nan) for size in SIZES], 17)
    assert passes < 20


@st.composite
def many_alike(draw: st.DrawFn) -> list[Tensor]:
    """Tensors in which a few values repeat, in stretches or scattered, beside zeros and values of their own."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.tensor(draw(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=4)))
    tensors = []
    for size in draw(st.lists(st.integers(0, 6000), min_size=1, max_size=4)):
        alike = values[torch.randint(len(values), (size,), generator=generator)]
        own = torch.randn(size, generator=generator)
        mixed = own.where(torch.rand(size, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), alike)
        zeroed = mixed.where(torch.rand(size, generator=generator) < draw(st.sampled_from([0.1, 1.0])), 0)
        tensors.append(zeroed.sort().values if draw(st.booleans()) else zeroed)
    return tensors


@settings(max_examples=150)
@given(many_alike(), st.floats(0, 1), st.integers(200, 8000))
def test_any_share_of_anything_in_any_pieces_is_what_sorting_gives(tensors: Any, share: Any, piece: Any) -> None:
    descending = torch.cat(tensors).abs().sort(descending=True).values.tolist()
    count = round(share * len(descending))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "SMALLEST_SAMPLE", 16)  # else models of this size are sorted at once
        found, _ = kth(tensors, count, piece)
    kept = sum(magnitude >= found for magnitude in descending)
    assert found == (descending[count - 1] if 0 < count < len(descending) else 0.0 if count else math.inf)
    assert kept >= count
