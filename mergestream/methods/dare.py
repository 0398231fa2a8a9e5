"""DARE: drop and rescale."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mergestream.algebra.lowrank import Value, dense
from mergestream.algebra.pieces import chosen
from mergestream.digest import json_digest
from mergestream.methods.base import Absorbed, Context, Method, State, parameter
from mergestream.methods.task_arithmetic import TaskArithmetic


@dataclass(frozen=True)
class DARE(TaskArithmetic):
    """The sum of all task vectors, each reduced to a random share of its entries and rescaled.

        S_t = S_{t-1} + m_t ⊙ Δ_t / d,   merged_t = θ⁰ + scale·S_t        m_t: 1 with probability d, else 0

    Yu et al. 2023 (arXiv 2311.03099), whose drop rate is 1 − d. m_t is a function of the seed, the names of the expert
    and of the tensor and the position, so it is the same in any order of arrival, and when the expert is removed.
    """

    name = "dare"
    factored = False
    absorb_all = Method.absorb_all

    density: float = parameter(0.5, "d, the share of the entries that is kept", above=0, at_most=1)
    seed: int = parameter(0, "seed of the random choice of entries", at_least=0)

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        kept = thinned(dense(delta), self.density, self.seed, context)
        rescaled = kept / self.density
        return Absorbed({"sum": rescaled if state is None else state["sum"] + rescaled}, kept)


def thinned(delta: Tensor, density: float, seed: int, context: Context) -> Tensor:
    """A random share of the entries; the others become zero."""
    key = int(json_digest([seed, context.expert, context.tensor]), 16)
    mask = chosen(key, density, context.start, delta.numel())
    return delta * mask.to(delta.device).reshape(delta.shape)
