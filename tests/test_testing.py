"""The contract suite catches methods that break the contract, each in its own way."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mergestream import METHODS, Average, Method, register_method, testing
from mergestream.algebra import pieces
from mergestream.algebra.lowrank import Value, dense
from mergestream.methods.base import Absorbed, Context, Slot, State
from mergestream.testing import contract


@dataclass(frozen=True)
class Unlike(Average):
    """Dense and one after the other, so that what a method below does to tensors is what happens."""

    name = "unlike"
    factored = False
    absorb_all = Method.absorb_all


@dataclass(frozen=True)
class Overwriting(Unlike):
    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        return Absorbed({"sum": delta if state is None else dense(state["sum"]).add_(dense(delta))})


@dataclass(frozen=True)
class OverwritingLater(Unlike):
    def direction(self, state: State, context: Context) -> Value:
        return dense(state["sum"]).mul_(0.5)


@dataclass(frozen=True)
class ByThePiece(Unlike):
    """Treats the elements of a piece together, where they go by in pieces."""

    def direction(self, state: State, context: Context) -> Value:
        S = dense(state["sum"])
        return S - S.mean()


@dataclass(frozen=True)
class LaidOutWrong(Unlike):
    def layout(self, context: Context) -> dict[str, Slot]:
        return {"sum": context.like, "count": context.like}


@dataclass(frozen=True)
class LatestOnly(Unlike):
    """Says that it is commutative."""

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        return Absorbed({"sum": delta})


@dataclass(frozen=True)
class DividesByZero(Unlike):
    def direction(self, state: State, context: Context) -> Value:
        S = dense(state["sum"])
        return S / S.abs().sqrt()


@dataclass(frozen=True)
class NotASum(Unlike):
    additive = False

    def check_scale(self, rule: object) -> None:
        """Accepts all."""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_registered", {})
    register_method(Unlike)


@pytest.mark.parametrize(
    ("method", "check", "fault"),
    [
        (Overwriting(), contract.arguments_are_not_modified, "arguments of absorb: sum differs"),
        (OverwritingLater(), contract.arguments_are_not_modified, "arguments of direction: sum differs"),
        (ByThePiece(), contract.workers_and_pieces_change_no_byte, "in pieces of 1"),
        (LaidOutWrong(), contract.state_matches_layout, "do not match the layout"),
        (LatestOnly(), contract.order_does_not_matter, "in another order"),
        (DividesByZero(), contract.zero_and_repeated_experts_are_absorbed, "is not absorbed"),
        (NotASum(), contract.any_number_is_a_scale, "is not refused"),
        (ByThePiece(), contract.is_found_by_name, "the name of another method"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_breach_is_found(method: Method, check: object, fault: str) -> None:
    if check is not contract.is_found_by_name:
        register_method(type(method))
    with pytest.raises(AssertionError, match=fault):
        testing.Check(method, check)()  # type: ignore[arg-type]


def test_pieces_are_of_the_usual_size_again() -> None:
    usual = pieces.PIECE
    with pytest.raises(KeyError), testing.pieces_of(7):
        assert list(pieces.ranges(15)) == [(0, 7), (7, 14), (14, 15)]
        raise KeyError
    assert usual == pieces.PIECE == 1 << 19


def test_checks_are_named_for_people() -> None:
    checks = testing.method_checks(Unlike(), Average())
    assert len({str(check) for check in checks}) == len(checks) == 2 * len(contract.OF_METHODS)
    assert str(checks[0]) == "is_found_by_name-Unlike()"
