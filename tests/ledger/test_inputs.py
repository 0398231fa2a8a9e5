"""Readouts that know the experts' inputs: their formulas, and what they must not depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from mergestream import Ledger
from mergestream.algebra.lowrank import LowRank
from mergestream.ledger.merge import merge_entries
from mergestream.ledger.moment import Moment
from mergestream.ledger.readouts.agree import Agree
from mergestream.ledger.readouts.regress import Regress
from mergestream.ledger.readouts.sum import Sum
from mergestream.ledger.span import Entry, Span
from mergestream.methods.base import Context
from mergestream.testing import make_models
from tests.ledger import formulas

M, N = 40, 24
CONTEXT = Context(4, True, (M, N), torch.float64)
WEIGHTS = (0.5, 2.0, 1.25, 1.0)


def deltas() -> list[Tensor]:
    base, *experts = make_models(4, torch.float64)
    return [expert["a.weight"] - base["a.weight"] for expert in experts]


def moment(seed: int, directions: int = 6) -> Moment:
    """Of inputs that lie mostly in a few directions, which differ from expert to expert."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(60, N, generator=generator, dtype=torch.float64) @ torch.diag(
        torch.logspace(0, -2, N, dtype=torch.float64)
    )
    x = (seed + 1) * x @ torch.linalg.qr(torch.randn(N, N, generator=generator, dtype=torch.float64))[0]
    return Moment.of(x.T @ x / len(x), directions)


def entries(moments: Sequence[Moment | None], adapters: Sequence[bool], weights: Sequence[float]) -> list[Entry]:
    method, made = Ledger(budget=8, entries="float32"), []
    for delta, known, is_adapter, weight in zip(deltas(), moments, adapters, weights, strict=False):
        state = method.absorb(None, delta, CONTEXT).state
        made.append(Entry(cast("dict[str, Tensor]", state), weight, known, is_adapter))
    return made


def dense(known: Moment | None) -> Tensor | None:
    return None if known is None else known.apply(torch.eye(N))


CASES = {
    "full": ([True] * 4, [False] * 4),
    "adapters": ([True] * 4, [True] * 4),
    "half of the full": ([True, False, False, True], [False] * 4),
    "half of the adapters": ([True, False, False, True], [True] * 4),
    "both kinds": ([True, False, True, False], [True, True, False, False]),
    "no inputs": ([False] * 4, [False] * 4),
    "adapters without inputs": ([False] * 4, [True] * 4),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("directions", [2, 6, N])
def test_regress_is_its_formula(case: str, directions: int) -> None:
    given, adapters = CASES[case]
    moments = [moment(seed, directions) if has else None for seed, has in enumerate(given)]
    merged = merge_entries(Regress(), entries(moments, adapters, WEIGHTS), CONTEXT)
    expected = formulas.regress(deltas(), [dense(known) for known in moments], WEIGHTS, adapters)
    assert isinstance(merged, Tensor)
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-7)


def test_one_expert_alone_comes_back() -> None:
    for is_adapter in (False, True):
        for known in (moment(0), None):
            (entry,) = entries([known], [is_adapter], [1.0])
            merged = merge_entries(Regress(), [entry], CONTEXT)
            assert isinstance(merged, Tensor)
            torch.testing.assert_close(merged, deltas()[0], rtol=1e-5, atol=1e-7)


def test_experts_that_cancel_each_other_are_not_made_long_again() -> None:
    """What is left of them is rounding, and the length that the experts have is no reason to amplify it."""
    (entry,) = entries([moment(0)], [True], [1.0])
    against = Entry({**entry.slots, "left": -entry.slots["left"]}, 1.0, entry.moment, True)
    merged = merge_entries(Regress(), [entry, against], CONTEXT)
    assert isinstance(merged, Tensor)
    assert float(merged.norm()) < 1e-6 * float(deltas()[0].norm())


def test_inputs_that_are_all_zero_give_finite_weights() -> None:
    dead = Moment.of(torch.zeros(N, N), 6)
    for is_adapter in (False, True):
        merged = merge_entries(Regress(), entries([dead, moment(1)], [is_adapter] * 2, [1.0, 1.0]), CONTEXT)
        assert isinstance(merged, Tensor)
        assert bool(merged.isfinite().all())
    merged = merge_entries(Regress(), entries([dead], [True], [1.0]), CONTEXT)
    assert isinstance(merged, Tensor)
    assert bool(merged.isfinite().all())


def test_the_order_of_arrival_changes_no_bit() -> None:
    made = entries([moment(0), None, moment(2), None], [True, True, False, False], WEIGHTS)
    merged = merge_entries(Regress(), made, CONTEXT)
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        again = merge_entries(Regress(), [made[number] for number in order], CONTEXT)
        assert isinstance(merged, Tensor) and isinstance(again, Tensor)
        assert torch.equal(again, merged)


def test_adapters_come_out_as_an_adapter() -> None:
    method = Ledger(budget=8, entries="float32")
    generator = torch.Generator().manual_seed(0)
    made = []
    for seed, rank in enumerate((2, 3, 1)):
        left, right = (torch.randn(shape, generator=generator) for shape in ((M, rank), (rank, N)))
        delta = LowRank.from_factors(left, right, torch.float64, (M, N))
        state = method.absorb(None, delta, Context(3, True, (M, N), torch.float64, rank=rank)).state
        made.append(Entry(cast("dict[str, Tensor]", state), 1.0, moment(seed), True))
    factored = merge_entries(Regress(), made, CONTEXT, in_factors=True)
    plain = merge_entries(Regress(), made, CONTEXT)
    assert isinstance(factored, LowRank) and isinstance(plain, Tensor)
    assert factored.rank == 6
    torch.testing.assert_close(factored.dense(), plain, rtol=1e-6, atol=1e-8)


def test_an_expert_that_leaves_the_weight_alone_keeps_its_inputs_as_they_were() -> None:
    made = entries([moment(0)], [True], [1.0])
    quiet = Entry({}, 1.0, moment(0), True)
    alone, merged = (merge_entries(Regress(), held, CONTEXT) for held in (made, [*made, quiet]))
    assert isinstance(alone, Tensor) and isinstance(merged, Tensor)
    assert float(merged.norm()) < 0.8 * float(alone.norm())
    for held in ([*made, quiet], [quiet, *made]):
        again = merge_entries(Regress(), held, CONTEXT)
        assert isinstance(again, Tensor) and torch.equal(again, merged)


def test_a_transposed_weight_is_merged_by_its_inputs() -> None:
    made = entries([moment(seed) for seed in range(4)], [False] * 4, WEIGHTS)
    turned = [
        Entry({**each.slots, "left": each.slots["right"], "right": each.slots["left"]}, each.weight, each.moment)
        for each in made
    ]
    plain = merge_entries(Regress(), made, CONTEXT)
    transposed = merge_entries(Regress(), turned, Context(4, True, (N, M), torch.float64, transposed=True))
    assert isinstance(plain, Tensor) and isinstance(transposed, Tensor)
    torch.testing.assert_close(transposed.T, plain, rtol=1e-9, atol=1e-12)


def test_damage_is_measured_on_the_inputs_where_they_are_known() -> None:
    moments = [moment(0), None, moment(2), None]
    made = entries(moments, [False] * 4, WEIGHTS)
    (span,) = Span.of(made, torch.float64, False)
    for readout in (Regress(), Agree(), Sum()):
        coefficients = readout.coefficients(span)
        merged = span.outputs.T @ span.right_factor(coefficients)
        found = span.damage(coefficients)
        for number, (delta, known) in enumerate(zip(deltas(), moments, strict=True)):
            G = delta.T @ delta if known is None else known.apply(torch.eye(N))
            missed = ((merged - delta) @ G * (merged - delta)).sum() / (delta @ G * delta).sum()
            assert found[number] == pytest.approx(float(missed), rel=1e-4)
