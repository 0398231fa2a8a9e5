"""TIES on all models at once against one after the other, where the two could part."""

from __future__ import annotations

import pytest
import torch

from mergestream import TIES, Method
from mergestream.methods.base import Context


@pytest.mark.parametrize("models", [1, 2, 3, 8])
@pytest.mark.parametrize("threshold", [0.0, 0.25, 10.0])
def test_all_at_once_is_the_same_as_one_after_the_other(models: int, threshold: float) -> None:
    method = TIES(mode="streaming")
    # Few values, as in bfloat16 models: magnitudes at the threshold, and sums that cancel exactly, are common.
    numbers = torch.randint(-4, 5, (models, 10_000), generator=torch.Generator().manual_seed(models)) / 8
    contexts = [Context(t, False, thresholds={"delta": threshold}) for t in range(1, models + 1)]
    kept2, direction = method.absorb_all(list(numbers.clone()), contexts)
    kept2_in_turn, direction_in_turn = Method.absorb_all(method, list(numbers), contexts)
    assert kept2 == kept2_in_turn
    assert torch.equal(direction, direction_in_turn)


def test_where_the_sum_is_zero_the_positive_side_is_elected() -> None:
    deltas = [torch.tensor([1.0, -2.0]), torch.tensor([2.0, 2.0]), torch.tensor([-3.0, 0.0])]
    contexts = [Context(t, False, thresholds={"delta": 0.5}) for t in (1, 2, 3)]
    _, direction = TIES(mode="streaming").absorb_all(deltas, contexts)
    assert direction.tolist() == [1.5, 2.0]


def test_opposing_sides_beyond_float32_do_not_overflow() -> None:
    deltas = [torch.tensor([3e38]), torch.tensor([-3e38])]
    contexts = [Context(t, False, thresholds={"delta": 1.0}) for t in (1, 2)]
    _, direction = TIES(mode="streaming").absorb_all(deltas, contexts)
    assert direction.tolist() == pytest.approx([3e38])
