"""The contract of a method: absorb a task vector into a state of fixed size, read a model out of it.

A method is a pure function of tensors. It sees one tensor at a time and knows nothing of files,
devices or threads; of the whole model it sees only the few scalars that it asks for.

    merged = θ⁰ + readout_scale(t, mean ‖Δ‖, ‖direction‖) · direction(state)
"""

from __future__ import annotations

import dataclasses
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from mergestream.algebra.pieces import squared_norm
from mergestream.errors import UsageError

State = dict[str, Tensor]
"""The named slots that a method keeps for one tensor of the model."""


@dataclass(frozen=True)
class Context:
    """What a method may know beside the tensor at hand."""

    t: int
    """How many models there are with this one: 1 for the first."""
    linear: bool
    """Whether the tensor is the weight of a linear layer (or a stack of them, in three dimensions).
    Tensors come in pieces, except linear weights where the method asks for them whole."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """For every name in the method's ranking: the least of the magnitudes that are kept."""


@dataclass(frozen=True)
class Ranking:
    """Asks for the magnitude that the ``density`` largest entries of a tensor reach."""

    names: tuple[str, ...]
    """``delta`` for the task vector, or slots of the state."""
    density: float
    over: Literal["model", "tensor"]
    """Whether entries compete with those of the whole model, or of their own tensor."""


@dataclass(frozen=True)
class Absorbed:
    """What became of one task vector."""

    state: State
    kept: Tensor
    """The part of Δ that entered the state."""
    protected: int | None = None
    """How many directions of the old state were protected, where the method protects any."""


def parameter(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is a method's parameter, with its documentation and its range."""
    metadata = {"help": help, "at_least": at_least, "at_most": at_most, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Method(ABC):
    """Base class of all methods; the dataclass fields of a subclass are its parameters."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, limits = getattr(self, item.name), item.metadata
            if limits["choices"] and value not in limits["choices"]:
                raise UsageError(f"{self.name}: {item.name}={value} is not one of {', '.join(limits['choices'])}")
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{self.name}: {item.name}={value} must be finite")
            low, high = limits["at_least"], limits["at_most"]
            if (low is not None and not value >= low) or (high is not None and not value <= high):
                bounds = f"at least {low}" if high is None else f"between {low} and {high}"
                raise UsageError(f"{self.name}: {item.name}={value} must be {bounds}")

    @property
    def parameters(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def commutative(self) -> bool:
        """Whether the order of arrival makes no difference."""
        return False

    @property
    def whole_linear(self) -> bool:
        """Whether linear weights are absorbed as matrices; everything else is elementwise."""
        return False

    @property
    def factored(self) -> bool:
        """Whether the method also works on factors: then Δ and the slots may be `LowRank` instead of tensors,
        which have the same arithmetic (sums, differences, products with numbers)."""
        return False

    @property
    def one_pass(self) -> bool:
        """Whether a tensor can be carried through all models and read out without the others'
        states or norms; then a one-shot merge needs no store."""
        return True

    @abstractmethod
    def slots(self, t: int) -> tuple[str, ...]:
        """Names of the state's slots after t models; each slot has the shape of the tensor."""

    def ranking(self, t: int) -> Ranking | None:
        """Which magnitudes must be ranked before the t-th model is absorbed, if any."""
        return None

    @abstractmethod
    def absorb(self, state: State | None, delta: Tensor, context: Context) -> Absorbed:
        """Absorb Δ; ``state`` is None before the first model. Arguments are never written to."""

    @abstractmethod
    def direction(self, state: State, t: int) -> Tensor:
        """The merged task vector up to a scale that is common to all tensors."""

    def absorb_all(self, deltas: Sequence[Tensor], contexts: Sequence[Context]) -> tuple[list[float | None], Tensor]:
        """‖kept‖² of every Δ (None where all is kept), and the direction after the last.

        Where all models are at hand, a method may know a shorter way to the same than absorbing one after the other.
        The deltas may be written to.
        """
        state: State | None = None
        kept2: list[float | None] = []
        for delta, context in zip(deltas, contexts, strict=True):
            absorbed = self.absorb(state, delta, context)
            state = absorbed.state
            kept2.append(None if absorbed.kept is delta else squared_norm(absorbed.kept))
        assert state is not None
        return kept2, self.direction(state, len(deltas))

    def readout_scale(self, t: int, mean_norm: float, direction_norm: float) -> float:
        """The common scale, from the mean norm of the task vectors and the norm of the direction."""
        return 1.0


def parse_parameters(method: type[Method], given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``KEY=VALUE`` strings into the types of the method's fields."""
    fields = {item.name: item for item in dataclasses.fields(method)}
    types = typing.get_type_hints(method)
    parsed = {}
    for key, value in given.items():
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise UsageError(f"{method.name} has no parameter {key} (it has: {known})")
        kind = types[key] if types[key] in (int, float) else str
        try:
            parsed[key] = kind(value)
        except ValueError:
            raise UsageError(f"{method.name}: {key}={value} is not a number") from None
    return parsed
