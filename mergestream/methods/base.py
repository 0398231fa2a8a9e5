"""The contract of a method: absorb a task vector into a state of fixed size, read a direction out of it.

A method is a pure function of tensors. It sees one tensor at a time and knows nothing of files,
devices or threads. Of the whole model it sees only the few scalars that it asks for.

    merged = θ⁰ + scale · direction(state)

There are two kinds of tensor. *Whole* tensors are absorbed and read out in one piece, and their slots have any shape
that the method lays out. *Elementwise* tensors are processed in pieces: the method works on each element alone, and
every slot has the shape of the tensor.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mergestream.algebra.lowrank import Value as Value
from mergestream.algebra.lowrank import dense as dense
from mergestream.algebra.lowrank import squared_norm
from mergestream.errors import UsageError, did_you_mean
from mergestream.methods.scale import NAMED, Scale

State = dict[str, Value]
"""The named slots that a method keeps for one tensor of the model, or the same elements of each."""


@dataclass(frozen=True)
class Slot:
    """Shape and dtype of a slot."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Context:
    """What a method knows besides the tensor, or the piece of a tensor, that it gets."""

    t: int
    """The number of experts, this one included: 1 for the first"""
    linear: bool
    """Whether the tensor is the weight of a linear layer (or a stack of them, in three dimensions)"""
    shape: tuple[int, ...] = ()
    """The shape of the whole tensor"""
    dtype: torch.dtype = torch.float32
    """The dtype of task vectors and states: float32, and float64 for a float64 model"""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """For every name in the method's ranking: the smallest magnitude that is kept"""
    rank: int | None = None
    """For a ledger: a bound of the rank of Δ, where Δ arrives in factors"""
    others: tuple[int, ...] = ()
    """For a ledger: how many directions of the tensor each of the other experts wants"""
    transposed: bool = False
    """Whether a linear weight is stored input × output, as those of GPT-2 and the experts of gpt-oss"""
    tensor: str = ""
    """The tensor's name"""
    expert: str = ""
    """The name of the expert whose Δ this is"""
    start: int = 0
    """The index of the piece's first element in the whole tensor"""
    base: Tensor | None = None
    """θ⁰ of a whole tensor, for methods with `needs_base`"""

    @property
    def like(self) -> Slot:
        """A slot of the tensor's own shape and type."""
        return Slot(self.shape, self.dtype)

    @cached_property
    def matrices(self) -> tuple[int, int, int]:
        """How many matrices a stack of linear weights holds (0 where it is one matrix), and their shape.

        Any other tensor is the matrix with its first dimension as rows.
        """
        if self.linear and len(self.shape) == 3:
            return self.shape
        return 0, (self.shape[0] if self.shape else 1), math.prod(self.shape[1:])


@dataclass(frozen=True)
class Ranking:
    """A request for the smallest magnitude among the ``density`` largest elements."""

    names: tuple[str, ...]
    """``delta`` for the task vector, or slots of the state"""
    density: float
    over: Literal["model", "tensor"]
    """Whether elements compete with those of the whole model, or of their own tensor"""
    fewest: int = 0
    """The least number of elements that is kept, whatever the density"""


@dataclass(frozen=True)
class Absorbed:
    """The result of absorbing one task vector."""

    state: State
    kept: Value | None = None
    """The part of Δ that entered the state; None where all of it did. All pieces of a tensor report it, or none."""
    protected: int | None = None
    """How many directions of the old state were protected, where the method protects any"""


def parameter(
    default: Any,
    help: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is a method's parameter, with its documentation and its range."""
    metadata = {"help": help, "above": above, "at_least": at_least, "at_most": at_most, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Method(ABC):
    """Base class of all methods; the dataclass fields of a subclass are its parameters.

    `commutative` and `scale_rule` are constant for most methods, which override them by class attributes.
    """

    name: ClassVar[str]
    whole: ClassVar[Literal["linear", "none", "all"]] = "linear"
    """Which tensors are absorbed whole: the weights of linear layers, none, or all"""
    slots: ClassVar[tuple[str, ...]] = ()
    """The slots of a state, where each has the shape and dtype of its tensor; else override `layout`"""
    factored: ClassVar[bool] = False
    """Whether Δ and the slots may be `LowRank`, which has the arithmetic of tensors: sums, differences, multiples"""
    additive: ClassVar[bool] = False
    """Whether the direction is the sum of what was kept: then any scale rule can be chosen at the readout"""
    needs_base: ClassVar[bool] = False
    """Whether `absorb` needs ``context.base``; for methods that absorb all tensors whole"""
    keeps_entries: ClassVar[bool] = False
    """Whether every expert has an entry of its own, as in a ledger: then `absorb` gets no state, and the direction
    depends on the readout. Else one state absorbs all experts."""

    @property
    def commutative(self) -> bool:
        """Whether the result is the same for any order of arrival."""
        return False

    @property
    def scale_rule(self) -> Scale:
        """The method's default scale: its parameter `scale`, if it has one, else 1."""
        scale: Scale = getattr(self, "scale", 1.0)
        return scale

    def ranking(self, t: int) -> Ranking | None:
        """Which magnitudes must be ranked before the t-th expert is absorbed, if any."""
        return None

    def layout(self, context: Context) -> dict[str, Slot]:
        """The slots of a tensor's state after ``context.t`` experts."""
        return dict.fromkeys(self.slots, context.like)

    @abstractmethod
    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        """Absorb Δ; ``state`` is None before the first expert. Never write to the arguments."""

    def direction(self, state: State, context: Context) -> Value:
        """The merged task vector, up to a scale that all tensors share; by default the only slot."""
        (merged,) = state.values()
        return merged

    def absorb_all(self, deltas: Sequence[Tensor], contexts: Sequence[Context]) -> tuple[list[float | None], Tensor]:
        """‖kept‖² of every Δ (None where all is kept), and the direction after the last, for pieces of elementwise
        tensors.

        Override it where merging all experts at once is faster than absorbing them one by one. The deltas may be
        written to.
        """
        return absorb_in_turn(self, deltas, contexts)

    def absorb_whole(
        self, deltas: Iterable[Value], contexts: Sequence[Context], device: str
    ) -> tuple[list[float | None], Tensor]:
        """The same for whole tensors; only one Δ need be in memory at a time."""
        return absorb_in_turn(self, deltas, contexts)

    def layout_as_stored(self, context: Context, found: Mapping[str, tuple[int, ...]]) -> dict[str, Slot]:
        """The slots that a stored tensor must have; ``found`` are the shapes of those that it has."""
        return self.layout(context)

    def cut(self, t: int) -> int:
        """How many experts share the space when the entry of the t-th is written; 0 where there are no entries."""
        return 0

    @property
    def parameters(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def is_whole(self, context: Context) -> bool:
        return self.whole == "all" or (context.linear and self.whole == "linear")

    def check_scale(self, rule: Scale) -> None:
        """Refuse a scale rule that does not fit this method's state."""
        if rule in NAMED and rule != self.scale_rule and not self.additive:
            raise UsageError(
                f"{self.name} does not add up task vectors, so the scale {rule} does not apply; pass a number"
            )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, limits = getattr(self, item.name), item.metadata
            given = f"{self.name}: {item.name}={value}"
            choices = limits.get("choices")
            if choices and value not in choices:
                raise UsageError(f"{given} is not one of {', '.join(choices)}")
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{given} must be finite")
            above, low, high = limits.get("above"), limits.get("at_least"), limits.get("at_most")
            if above is not None and not above < value <= (math.inf if high is None else high):
                raise UsageError(f"{given} must be above {above}" + ("" if high is None else f", and at most {high}"))
            if (low is not None and not value >= low) or (high is not None and not value <= high):
                bounds = f"at least {low}" if high is None else f"between {low} and {high}"
                raise UsageError(f"{given} must be {bounds}")


def absorb_in_turn(
    method: Method, deltas: Iterable[Value], contexts: Sequence[Context]
) -> tuple[list[float | None], Tensor]:
    """Absorb one Δ after the other; returns the same as `Method.absorb_all`, for tensors of any kind."""
    state: State | None = None
    kept2: list[float | None] = []
    for delta, context in zip(deltas, contexts, strict=True):
        absorbed = method.absorb(state, delta, context)
        state = absorbed.state
        kept2.append(None if absorbed.kept is None else squared_norm(absorbed.kept))
    assert state is not None
    return kept2, dense(method.direction(state, contexts[-1]))


def parse_parameters(method: type[Method], given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``KEY=VALUE`` strings into the types of the method's fields: numbers, true or false, or text."""
    fields = {item.name: item for item in dataclasses.fields(method)}
    types = typing.get_type_hints(method)
    parsed = {}
    for key, value in given.items():
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise UsageError(f"{method.name} has no parameter {key}{did_you_mean(key, fields)} (it has: {known})")
        try:
            parsed[key] = _PARSERS[types[key]](value) if types[key] in _PARSERS else value
        except (ValueError, TypeError, OverflowError, KeyError):
            kind = "true or false" if types[key] is bool else "a number"
            raise UsageError(f"{method.name}: {key}={value} is not {kind}") from None
    return parsed


def _truth(given: object) -> bool:
    return {"true": True, "false": False}[str(given).lower()]


_PARSERS: dict[Any, Callable[[Any], Any]] = {int: int, float: float, bool: _truth}
