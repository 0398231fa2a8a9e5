"""TIES-merging: trim, elect a sign, merge what agrees with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Literal

import torch
from torch import Tensor

from mergestream.algebra.lowrank import Value, dense, squared_norm
from mergestream.methods.base import Absorbed, Context, Method, Ranking, Slot, State, parameter
from mergestream.methods.scale import Scale


@dataclass(frozen=True)
class TIES(Method):
    """Trim each task vector to its largest entries, elect the sign of their sum, drop the others.

    ``continual``, as printed in the paper (appendix, equation of continual Ties-Merging):

        M_1 = scale·Δ_1,   M_t = scale·(M' + Δ')   with {M', Δ'} = trimmed {M_{t-1}, Δ_t} of the elected sign

    ``reference``, as in the authors' code:  M_t = M_{t-1} + scale·(M' + Δ').
    ``streaming``, equal to the batch method on all models, in any order: sums and counts of the
    trimmed entries above and below zero are kept, and the mean of the elected side is read out, × scale.
    """

    name = "ties"
    whole = "none"

    density: float = parameter(0.2, "share of the entries that survives trimming", at_least=0, at_most=1)
    scale: float = parameter(0.3, "what the merged entries are multiplied by")
    mode: Literal["continual", "reference", "streaming"] = parameter(
        "continual",
        "the paper's recursion, the authors' code, or the batch method's state",
        choices=("continual", "reference", "streaming"),
    )
    trim: Literal["model", "tensor"] = parameter(
        "model", "whether entries compete over the whole model or per tensor", choices=("model", "tensor")
    )

    @property
    def commutative(self) -> bool:
        return self.mode == "streaming"

    @property
    def scale_rule(self) -> Scale:
        return self.scale if self.mode == "streaming" else 1.0

    def layout(self, context: Context) -> dict[str, Slot]:
        if self.mode == "streaming":
            return dict.fromkeys(("positive", "negative", "positive_count", "negative_count"), context.like)
        return {"merged": context.like}

    def ranking(self, t: int) -> Ranking | None:
        if t == 1 and self.mode != "streaming":
            return None
        names = ("delta",) if self.mode == "streaming" else ("delta", "merged")
        return Ranking(names, self.density, self.trim)

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        delta = dense(delta)
        before = {slot: dense(value) for slot, value in state.items()} if state is not None else None
        if self.mode == "streaming":
            return self._add(before, trim(delta, context.thresholds["delta"]))
        if before is None:
            return Absorbed({"merged": delta * self.scale})
        trimmed = trim(delta, context.thresholds["delta"])
        merged = trim(before["merged"], context.thresholds["merged"])
        elected = (merged + trimmed).sign()
        kept = trimmed * agreement(trimmed, elected)
        result = (merged * agreement(merged, elected) + kept) * self.scale
        if self.mode == "reference":
            result += before["merged"]
        return Absorbed({"merged": result}, kept)

    def _add(self, before: dict[str, Tensor] | None, trimmed: Tensor) -> Absorbed:
        sign = trimmed.sign()
        above = sign.clamp(min=0)
        new = {
            "positive": trimmed.clamp(min=0),
            "negative": trimmed.clamp(max=0),
            "positive_count": above,
            "negative_count": above - sign,
        }
        if before is not None:
            for slot, value in new.items():
                value += before[slot]
        return Absorbed({**new}, kept=trimmed)

    def direction(self, state: State, context: Context) -> Value:
        if self.mode != "streaming":
            return state["merged"]
        positive, negative = dense(state["positive"]), dense(state["negative"])
        up = (positive + negative).sign_().add_(1).clamp_(max=1)  # 1 where the positive side is elected, else 0
        count = torch.lerp(dense(state["negative_count"]), dense(state["positive_count"]), up)
        return torch.lerp(negative, positive, up).div_(count.clamp_(min=1))

    def absorb_all(self, deltas: Sequence[Tensor], contexts: Sequence[Context]) -> tuple[list[float | None], Tensor]:
        """The batch method, in place: half of the memory passes that sums and counts of both sides take."""
        if self.mode != "streaming":
            return super().absorb_all(deltas, contexts)
        kept2: list[float | None] = []
        for delta, context in zip(deltas, contexts, strict=True):
            trim(delta, context.thresholds["delta"], out=delta)
            kept2.append(squared_norm(delta))
        total = reduce(torch.add, deltas)
        elected = torch.copysign(torch.ones((), dtype=total.dtype), total)
        agreeing = [delta.mul_(elected).relu_() for delta in deltas]
        count = reduce(Tensor.add_, (x.sign() for x in agreeing))
        return kept2, reduce(Tensor.add_, agreeing).mul_(elected).div_(count.clamp_(min=1))


# Masks and torch.where are many times slower than arithmetic on signs (docs: performance-notes.md).


def trim(x: Tensor, threshold: float, out: Tensor | None = None) -> Tensor:
    """x where |x| ≥ threshold, else 0."""
    return torch.hardshrink(x, _just_below(threshold, x.dtype), out=out)


@lru_cache
def _just_below(threshold: float, dtype: torch.dtype) -> float:
    return float(torch.nextafter(torch.tensor(threshold, dtype=dtype), torch.tensor(-torch.inf, dtype=dtype)))


def agreement(x: Tensor, elected: Tensor) -> Tensor:
    """1 where x has the elected sign, else 0."""
    return (x.sign() * elected).clamp_(min=0)
