"""Model Stock's ratio, where it is known."""

from __future__ import annotations

import pytest
import torch

from mergestream import Merger, ModelStock
from mergestream.methods.model_stock import ratio


def merged(*experts: list[float]) -> list[float]:
    merger = Merger({"a.bias": torch.zeros(len(experts[0]), dtype=torch.float64)}, ModelStock())
    for expert in experts:
        merger.add({"a.bias": torch.tensor(expert, dtype=torch.float64)})
    return merger.state_dict()["a.bias"].tolist()


def test_two_models_follow_the_papers_formula_whatever_their_norms() -> None:
    """2·cos θ / (1 + cos θ) of the mean; at an angle of 60° that is 2/3."""
    long, short = [10.0, 0.0], [0.5, 0.75**0.5]
    assert merged(long, short) == pytest.approx([2 / 3 * 5.25, 2 / 3 * 0.75**0.5 / 2])


def test_agreement_keeps_the_mean_and_orthogonal_models_the_base() -> None:
    assert merged([1.0, 2.0], [3.0, 6.0]) == pytest.approx([2.0, 4.0])
    assert merged([1.0, 0.0], [0.0, 1.0]) == pytest.approx([0.0, 0.0])


def test_one_model_alone_is_itself() -> None:
    assert merged([1.0, 2.0]) == [1.0, 2.0]


def test_models_that_cancel_out_leave_the_base() -> None:
    assert merged([1.0, 2.0], [-1.0, -2.0]) == [0.0, 0.0]
    assert ratio(-1.0 - 1e-15, 2) == 0.0


def test_a_model_that_did_not_move_agrees_with_none() -> None:
    """Of the three pairs one has the cosine 1: 3·(1/3) / (1 + 2/3) of the mean."""
    assert merged([1.0, 0.0], [1.0, 0.0], [0.0, 0.0]) == pytest.approx([0.6 * 2 / 3, 0.0])
