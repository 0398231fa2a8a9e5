"""Weights and densities: how they are given, and what they amount to where another method says the same."""

from __future__ import annotations

import pytest

from mergestream import TIES, Method, TaskArithmetic, Weighted
from mergestream.errors import UsageError
from mergestream.methods import make_method
from mergestream.methods.weighted import listed, nth
from mergestream.testing import assert_close, make_models, merged_in_memory


@pytest.mark.parametrize(
    ("weighted", "other"),
    [
        (Weighted(weights="0.3"), TaskArithmetic()),
        (
            Weighted(densities="0.5", elect=True, normalize=True, scale=0.3),
            TIES(mode="streaming", trim="tensor", density=0.5),
        ),
    ],
    ids=str,
)
def test_one_weight_for_all_is_what_other_methods_do(weighted: Weighted, other: Method) -> None:
    base, *experts = make_models(3)
    merged = merged_in_memory(weighted, base, experts)
    assert_close(merged, merged_in_memory(other, base, experts), base, 1e-5, "weighted")


def test_the_last_number_is_for_all_that_come_later() -> None:
    assert [nth("0.5,-2e-1", t) for t in (1, 2, 3)] == [0.5, -0.2, -0.2]
    numbers = [1 / 3, 1e-17, -2.0]
    assert listed(",".join(map(repr, numbers))) == tuple(numbers)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"weights": "0.5;0.3"}, "weights=0.5;0.3 is no list of numbers"),
        ({"weights": ""}, "is no list of numbers"),
        ({"weights": "1,inf"}, "is no list of numbers"),
        ({"densities": "0.5,0"}, "densities=0.5,0 must be above 0, and at most 1"),
        ({"densities": "1.5"}, "must be above 0, and at most 1"),
        ({"thin": "smallest"}, "is not one of largest, random"),
    ],
)
def test_wrong_lists_are_refused_with_a_sentence(given: dict[str, str], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        make_method("weighted", given)
