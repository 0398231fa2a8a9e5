"""What is told of experts, on experts of which it is known."""

from __future__ import annotations

import pytest
import torch

from benchmarks import spectra


def outer(row: int, column: int) -> torch.Tensor:
    made = torch.zeros(32, 64)
    made[row, column] = 2.0
    return made


def test_equal_experts_share_all_and_others_nothing() -> None:
    weight = torch.eye(32, 64)
    drawn = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    same = spectra.of_weight(weight, [drawn, -drawn])
    assert same is not None
    assert [same.cosine, same.inputs, same.outputs] == pytest.approx([1, 1, 1], abs=1e-5)
    assert same.norm == pytest.approx(float(drawn.norm()) / 32**0.5)
    halves = [torch.cat([drawn[:, :32], torch.zeros(32, 32)], 1), torch.cat([torch.zeros(32, 32), drawn[:, 32:]], 1)]
    apart = spectra.of_weight(weight, halves)
    assert apart is not None
    assert [apart.cosine, apart.inputs] == pytest.approx([0, 0], abs=1e-5)
    assert apart.outputs > apart.chance == 16 / 64


def test_one_direction_is_of_rank_one_and_has_all_energy() -> None:
    found = spectra.of_weight(torch.ones(32, 64), [outer(0, 1), outer(2, 3)])
    assert found is not None
    assert [found.stable_rank, found.leading_energy] == pytest.approx([1, 1])


def test_a_weight_that_an_expert_left_alone_is_left_out() -> None:
    assert spectra.of_weight(torch.ones(32, 64), [outer(0, 1), torch.zeros(32, 64)]) is None
