"""SLERP: along the arc from one model to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mergestream.algebra.lowrank import Value, dense
from mergestream.methods.base import Absorbed, Context, Method, State, parameter

_PARALLEL = 0.9995
"""|cos Ω| above which the arc is taken as a straight line, as mergekit does"""


@dataclass(frozen=True)
class SLERP(Method):
    """Spherical interpolation of two models; a further one is interpolated with the result.

        θ_i = a·θ_{i-1} + b·θ,   a = sin((1 − t)·Ω)/sin Ω,   b = sin(t·Ω)/sin Ω,   cos Ω = ⟨θ_{i-1}, θ⟩ / ‖θ_{i-1}‖‖θ‖

    Shoemake 1985 (SIGGRAPH, "Animating rotation with quaternion curves"), for the weights of each tensor by itself.
    Where |cos Ω| > 0.9995, a = 1 − t and b = t. The state is θ_i − θ⁰.
    """

    name = "slerp"
    whole = "all"
    slots = ("merged",)
    needs_base = True

    t: float = parameter(0.5, "how far along the arc: 0 is the earlier model, 1 the new one", at_least=0, at_most=1)

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        delta, base = dense(delta), context.base
        if state is None:
            return Absorbed({"merged": delta})
        assert base is not None
        before = dense(state["merged"])
        a, b = shares(base + before, base + delta, self.t)
        return Absorbed({"merged": before * a + delta * b + base * (a + b - 1)})


def shares(one: Tensor, other: Tensor, t: float) -> tuple[float, float]:
    """The factors a and b of two models; a tensor of zeros counts as orthogonal to all others."""
    lengths = math.sqrt(_dot(one, one)) * math.sqrt(_dot(other, other))
    cosine = _dot(one, other) / lengths if lengths else 0.0
    if abs(cosine) > _PARALLEL:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def _dot(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum(dtype=torch.float64))
