"""States in factors: how adapters are absorbed into an accumulator exactly, without multiplying them out.

A tensor stays in factors while every task vector arrives in factors, the method can work on them, and the factors
take less space than the dense tensor. `merging/step.py` calls these functions for such tensors only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mergestream.algebra.lowrank import FactorBounds, LowRank
from mergestream.methods.base import Absorbed, Context, Method

if TYPE_CHECKING:
    from mergestream.merging.plan import StepFiles


def factor_bounds(
    context: Context, rank: int | None, state: StepFiles | None, max_rank: int | None
) -> FactorBounds | None:
    """The space that a tensor's factors may take with Δ of this rank absorbed; None where the tensor becomes dense."""
    if rank is None:
        return None
    ranks = state.ranks(context.tensor) if state is not None else []
    return None if ranks is None else FactorBounds.after(context.shape, ranks, rank, max_rank)


def truncated_slots(method: Method, absorbed: Absorbed, max_rank: int | None) -> tuple[dict[str, LowRank], float]:
    """The new slots, cut to ``max_rank``, and the energy that the cut has lost."""
    slots: dict[str, LowRank] = {}
    lost2 = 0.0
    for slot, value in absorbed.state.items():
        assert isinstance(value, LowRank), f"{method.name} does not keep {slot} in factors"
        if max_rank is not None and max(value.left.rank, value.right.rank) > max_rank:
            value, lost = value.truncate(max_rank)
            lost2 += lost
        slots[slot] = value
    return slots, lost2
