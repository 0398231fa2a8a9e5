"""OPCM's theorems and its edge cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mergestream import OPCM, Merger
from mergestream.algebra.lowrank import Value
from mergestream.algebra.projection import Projection
from mergestream.errors import UsageError
from mergestream.methods import make_method
from mergestream.methods.base import Context, State
from mergestream.testing import make_models
from tests.methods import formulas

SHAPES = [(12, 30), (30, 30), (30, 12), (1, 9), (9, 1), (1, 1)]
PROJECTIONS = ["reference", "paper", "block"]


def absorbed(method: OPCM, S: torch.Tensor, delta: torch.Tensor) -> Any:
    return method.absorb({"sum": S}, delta, Context(t=2, linear=True))


def random_pair(shape: Any, dtype: Any = torch.float64, seed: Any = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    S, delta = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return (3 * S * torch.arange(1, shape[-1] + 1).pow(-0.4)).to(dtype), delta.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_one_step_equals_the_full_svd_formula(shape: Any, projection: Any, alpha: float) -> None:
    S, delta = random_pair(shape)
    kept = absorbed(OPCM(alpha=alpha, projection=projection), S, delta).kept
    torch.testing.assert_close(kept, formulas.project(S, delta, alpha, projection), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("projection", ["reference", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_theorem_1_the_kept_part_is_orthogonal_to_the_state(shape: Any, projection: Projection, dtype: Any) -> None:
    S, delta = random_pair(shape, dtype)
    kept = absorbed(OPCM(projection=projection), S, delta).kept.double()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    assert abs(float((kept * S.double()).sum())) <= tolerance * float(delta.norm() * S.norm())


def test_block_keeps_the_diagonal_and_so_is_not_orthogonal() -> None:
    S, delta = random_pair((20, 20))
    kept = absorbed(OPCM(projection="block"), S, delta + S).kept
    assert float((kept * S).sum()) > 0.1 * float(S.norm() ** 2)


def test_theorem_2_with_sqrt_scaling_the_distance_is_bounded_by_the_largest_task_vector() -> None:
    base, *experts = make_models(8)
    merger = Merger(base, OPCM(scaling="sqrt"))
    # The theorem is about projected tensors: the others' task vectors may add up.
    bound = max(formulas.norm({k: v[k] for k in ("a.weight", "b.weight")}) for v in formulas.deltas(base, experts))
    for expert in experts:
        merger.add(expert)
        merged = merger.state_dict()
        moved = formulas.norm({k: merged[k].double() - base[k].double() for k in ("a.weight", "b.weight")})
        assert moved <= bound * (1 + 1e-6)


def test_adaptive_scaling_keeps_the_distance_at_the_mean_norm() -> None:
    base, *experts = make_models(6)
    merger = Merger(base, OPCM())
    norms = [formulas.norm(vector) for vector in formulas.deltas(base, experts)]
    for t, expert in enumerate(experts, 1):
        totals = merger.add(expert)
        merged = merger.state_dict()
        moved = formulas.norm({name: merged[name].double() - base[name].double() for name in base})
        assert moved == pytest.approx(sum(norms[:t]) / t, rel=1e-5)
        assert totals.mean_norm == pytest.approx(sum(norms[:t]) / t, rel=1e-7)


def test_general_term_formula_the_state_is_the_sum_of_what_was_kept() -> None:
    generator = torch.Generator().manual_seed(1)
    method = OPCM()
    state: State | None = None
    kept: Value = torch.zeros(20, 15, dtype=torch.float64)
    for t in range(1, 6):
        delta = torch.randn(20, 15, generator=generator, dtype=torch.float64) * (1, 0.2, 4)[t % 3]
        step = method.absorb(state, delta, Context(t, linear=True))
        state, kept = step.state, kept + (delta if step.kept is None else step.kept)
    assert state is not None
    torch.testing.assert_close(state["sum"], kept)


def test_lambda_is_one_for_the_first_model_and_the_model_itself_comes_out() -> None:
    base, expert = make_models(1)
    merger = Merger(base, OPCM())
    totals = merger.add(expert)
    assert totals.scale == 1.0
    for name, x in merger.state_dict().items():
        torch.testing.assert_close(x, expert[name])


def test_orthogonal_task_vectors_give_lambda_sqrt_t() -> None:
    base = {"a.weight": torch.zeros(64, 64, dtype=torch.float64)}
    merger = Merger(base, OPCM())
    for t in range(1, 5):
        expert = torch.zeros(64, 64, dtype=torch.float64)
        block = slice(16 * (t - 1), 16 * t)
        expert[block, block] = torch.eye(16, dtype=torch.float64)
        totals = merger.add({"a.weight": expert})
        assert 1 / totals.scale == pytest.approx(math.sqrt(t))


def test_alpha_0_protects_nothing_and_alpha_1_all_but_one_direction() -> None:
    S, delta = random_pair((12, 8))
    assert absorbed(OPCM(alpha=0.0), S, delta).protected == 0
    assert absorbed(OPCM(alpha=1.0), S, delta).protected == 7


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rank_deficient_states_leave_the_null_space_alone(projection: Any, dtype: Any) -> None:
    S, delta = random_pair((20, 16), dtype)
    S[:, 5:] = 0
    expected = formulas.project(S.double(), delta.double(), 0.5, projection)
    kept = absorbed(OPCM(projection=projection), S, delta).kept.double()
    assert float((kept - expected).norm()) <= 1e-5 * float(expected.norm())


def test_a_zero_state_lets_everything_in() -> None:
    _, delta = random_pair((10, 6))
    assert torch.equal(absorbed(OPCM(), torch.zeros_like(delta), delta).kept, delta)


def test_the_state_itself_coming_again_is_removed_but_for_the_block_variant() -> None:
    S, _ = random_pair((10, 6))
    assert float(absorbed(OPCM(), S, S).kept.norm()) < 1e-12 * float(S.norm())


def test_stacked_experts_are_projected_slice_by_slice() -> None:
    S, delta = random_pair((3, 10, 6))
    stacked = absorbed(OPCM(), S, delta)
    for i in range(3):
        torch.testing.assert_close(stacked.kept[i], absorbed(OPCM(), S[i], delta[i]).kept)


def test_tensors_that_are_no_linear_weights_are_added_up() -> None:
    S, delta = random_pair((10, 6))
    step = OPCM().absorb({"sum": S}, delta, Context(t=2, linear=False))
    total = step.state["sum"]
    assert isinstance(total, torch.Tensor)
    assert torch.equal(total, S + delta)


@pytest.mark.parametrize(
    ("name", "parameters", "fault"),
    [
        ("opcm", {"alpha": "1.5"}, "between 0 and 1"),
        ("opcm", {"alpha": "much"}, "not a number"),
        ("opcm", {"alpha": "nan"}, "must be finite"),
        ("opcm", {"projection": "sideways"}, "is not one of"),
        ("opcm", {"beta": "1"}, "no parameter beta"),
        ("soup", {}, "no method soup"),
        ("lawa", {"window": "0"}, "at least 1"),
        ("lawa", {"window": "1.5"}, "not a number"),
    ],
)
def test_wrong_parameters_are_refused_with_a_sentence(name: str, parameters: Any, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        make_method(name, parameters)
