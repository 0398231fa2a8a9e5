"""What every method must do, present and future: a method that is not listed here fails the first test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
    MagMax,
    Method,
    ModelStock,
    TaskArithmetic,
    Weighted,
)
from mergestream.testing import Check, make_models, merged_in_memory, method_checks
from mergestream.testing.models import merger_of
from tests.methods import formulas

METHOD_CASES: list[Method] = [
    Ledger(),
    Ledger(budget=2.5, entries="float32", svd="exact"),
    OPCM(),
    OPCM(alpha=0.3, projection="paper"),
    OPCM(projection="block"),
    OPCM(alpha=0.8, scaling="sqrt"),
    Average(),
    TaskArithmetic(),
    TaskArithmetic(scale=0.1),
    TIES(),
    TIES(mode="reference"),
    TIES(mode="streaming"),
    TIES(trim="tensor"),
    TIES(mode="streaming", trim="tensor", density=0.5, scale=1.0),
    EMA(),
    EMA(beta=0.5),
    LAWA(),
    LAWA(window=2),
    MagMax(),
    DARE(),
    DARE(density=0.1, seed=7, scale=1.0),
    ModelStock(),
    SLERP(),
    SLERP(t=0.2),
    Weighted(),
    Weighted(weights="0.5,-0.3,0.9", densities="0.3,1,0.01", elect=True, normalize=True, scale=0.7),
    Weighted(weights="0.5,0.3", densities="0.5", thin="random", normalize=True, rescale=True, seed=3),
    Weighted(weights="0.5", densities="0.4", thin="random", elect=True),
]
every_method = pytest.mark.parametrize("method", METHOD_CASES, ids=str)


@pytest.mark.parametrize("check", method_checks(*METHOD_CASES), ids=str)
def test_the_contract(check: Check) -> None:
    check()


def formula(method: Method, base: Any, experts: Any) -> dict[str, Tensor]:
    result: dict[str, Tensor] = getattr(formulas, method.name)(base, experts, **method.parameters)
    return result


def assert_equals_the_formula(method: Method, base: Any, experts: Any) -> None:
    merged = merged_in_memory(method, base, experts)
    expected = formula(method, base, experts)
    for name in base:
        torch.testing.assert_close(merged[name] - base[name], expected[name], rtol=1e-7, atol=1e-9)


def test_every_registered_method_is_under_contract() -> None:
    assert {method.name for method in METHOD_CASES} == {
        name for name in METHODS if METHODS.origin(name) == "mergestream"
    }


@every_method
def test_equals_the_formula_in_float64(method: Any) -> None:
    base, *experts = make_models(dtype=torch.float64)
    assert_equals_the_formula(method, base, experts)


@every_method
def test_zero_vectors_give_what_the_formula_says(method: Any) -> None:
    base, one, other = make_models(2, dtype=torch.float64)
    for experts in ([base, one, other], [one, base, other], [one, other, base]):
        assert_equals_the_formula(method, base, experts)


@every_method
def test_float32_state_stays_close_to_the_formula(method: Any, models: list[dict[str, Tensor]]) -> None:
    base, *experts = models
    merged = merged_in_memory(method, base, experts)
    expected = formula(method, base, experts)
    difference = {name: merged[name].double() - base[name].double() - expected[name] for name in base}
    assert formulas.norm(difference) < 1e-4 * formulas.norm(expected)


@every_method
def test_first_model_alone(method: Any, models: list[dict[str, Tensor]]) -> None:
    base, expert, *_ = models
    merged = merged_in_memory(method, base, [expert])
    expected = formula(method, base, [expert])
    for name in base:
        torch.testing.assert_close(merged[name].double() - base[name].double(), expected[name], rtol=1e-4, atol=1e-6)


@every_method
def test_methods_that_are_not_commutative_mind_the_order(method: Any, models: list[dict[str, Tensor]]) -> None:
    """Each expert keeps its name: DARE chooses entries by it."""
    order = range(1, len(models))
    forth, back = (merger_of(method, models, numbers).state_dict() for numbers in (order, order[::-1]))
    same = all(torch.allclose(forth[name], back[name], rtol=1e-5, atol=1e-6) for name in forth)
    assert same == method.commutative or (method.name == "lawa" and method.parameters["window"] >= len(order))
