"""The ledger: of every expert, the leading directions of its own task vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mergestream.algebra import work
from mergestream.algebra.bounds import FactorBounds, matrix_shape
from mergestream.algebra.lowrank import Basis, LowRank, Value, dense, squared_norm
from mergestream.algebra.svd import ThinSVD, thin_svd
from mergestream.algebra.truncated import truncated_svd
from mergestream.methods.base import Absorbed, Context, Method, Slot, State, parameter

FEWEST = 8
"""Experts that there is room for from the start: with fewer, an entry is no longer than with these"""


@dataclass(frozen=True)
class Ledger(Method):
    """Remember every expert by its leading directions, and merge them when the model is read out.

        Δ_i = U Σ Vᵀ,  of which the entry keeps the first k_t = ⌊β·r / max(t, 8)⌋ triplets,  r = min(m, n), and ‖Δ_i‖²

    A tensor of more dimensions is the matrix with the first as rows; a stack of linear weights is as many matrices.
    What has one dimension, or would be cut below one direction, is kept whole. The cuts are nested: those of t experts
    begin with those of t + 1, so that cutting at every arrival gives what seeing all experts at once would.
    Sources: TSV (Gargiulo et al., 2025) for the cut at r/t; design section 8.
    """

    name = "ledger"
    whole = "all"
    factored = True
    commutative = True
    remembers_experts = True

    budget: float = parameter(
        1.0, "β: of a matrix of rank r all experts together keep β·r directions", above=0, at_most=8
    )
    entries: Literal["bfloat16", "float32"] = parameter(
        "bfloat16", "the type in which directions are kept", choices=("bfloat16", "float32")
    )
    svd: Literal["auto", "exact", "randomised"] = parameter(
        "auto", "how they are found: by the size of the matrix, or always so", choices=("auto", "exact", "randomised")
    )

    def directions(self, context: Context, cut: int) -> int | None:
        """How many directions an entry has of a tensor where ``cut`` experts share the room; None where it is whole."""
        _, m, n = stack_of(context)
        rank = min(m, n)
        if len(context.shape) < 2 or self.budget * rank < FEWEST:
            return None
        return min(rank, max(1, math.floor(self.budget * rank / max(cut, FEWEST))))

    def layout(self, context: Context) -> dict[str, Slot]:
        """None at all where an adapter leaves the tensor alone."""
        kept = self.directions(context, context.t)
        if context.rank == 0:
            return {}
        return self.slots(context, kept if kept is None or context.rank is None else min(kept, context.rank))

    def slots(self, context: Context, kept: int | None) -> dict[str, Slot]:
        """Those of an entry with so many directions; None where it is whole."""
        if kept is None:
            return {"delta": context.like}
        count, m, n = stack_of(context)
        stack, dtype = context.shape[: 1 if count else 0], getattr(torch, self.entries)
        return {
            "left": Slot((*stack, kept, m), dtype),
            "sigma": Slot((*stack, kept), torch.float64),
            "right": Slot((*stack, kept, n), dtype),
            "norm2": Slot(stack, torch.float64),
        }

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        """The expert's own entry, whatever came before it."""
        layout = self.layout(context)
        if not layout:
            return Absorbed({})
        if "delta" in layout:
            return Absorbed({"delta": dense(delta)})
        # As many as eight experts leave to each are found, whenever it comes: the order of arrival changes no bit.
        most = self.directions(context, FEWEST)
        assert most is not None
        count, m, n = stack_of(context)
        parts: list[tuple[ThinSVD, float]]
        if isinstance(delta, LowRank) and not count:
            parts = [(thin_svd(delta).dense(), squared_norm(delta))]
        else:
            matrices = dense(delta).reshape(count or 1, m, n)
            parts = [(truncated_svd(matrix, most, self.svd), squared_norm(matrix)) for matrix in matrices]
        kept = layout["sigma"].shape[-1]
        columns = {
            "left": [_rows(svd.u.T, kept) for svd, _ in parts],
            "sigma": [_rows(svd.s, kept) for svd, _ in parts],
            "right": [_rows(svd.v.T, kept) for svd, _ in parts],
            "norm2": [torch.tensor(norm2, dtype=torch.float64) for _, norm2 in parts],
        }
        entry: State = {
            slot: torch.stack([value.to(form.dtype) for value in columns[slot]]).reshape(form.shape)
            for slot, form in layout.items()
        }
        return Absorbed(entry, self.direction(entry, context))

    def operations(self, context: Context) -> Sequence[work.Work]:
        most = self.directions(context, FEWEST)
        if most is None:
            return ()
        count, m, n = stack_of(context)
        if context.rank is not None and not count:
            rank = min(context.rank, m, n)
            return work.factored(FactorBounds((m, n), (rank, rank), (rank, rank)))
        return work.truncated_svd(m, n, most, self.svd) * (count or 1)

    def direction(self, state: State, context: Context) -> Value:
        """The expert's task vector as its entry has it."""
        if not state:
            return LowRank.zeros(context.shape, context.dtype)
        if "delta" in state:
            return state["delta"]
        left, sigma, right = (dense(state[slot]) for slot in ("left", "sigma", "right"))
        if left.ndim == 3:
            return (left.mT.to(context.dtype) * sigma[:, None].to(context.dtype)) @ right.to(context.dtype)
        bases = (Basis(rows.shape[1], context.dtype, (rows,)) for rows in (left, right))
        return LowRank(torch.Size(context.shape), next(bases), torch.diag(sigma), next(bases))


def stack_of(context: Context) -> tuple[int, int, int]:
    """How many matrices a tensor is a stack of (0 where it is a matrix itself), and their shape."""
    if context.linear and len(context.shape) == 3:
        return context.shape
    return 0, *matrix_shape(context.shape)


def cut_entry(slots: Mapping[str, Tensor], kept: int | None) -> dict[str, Tensor]:
    """An entry with at most so many directions: a prefix of what it has."""
    lengths = {"left": -2, "sigma": -1, "right": -2}
    return {
        slot: value.narrow(lengths[slot], 0, min(kept, value.shape[lengths[slot]]))
        if slot in lengths and kept is not None
        else value
        for slot, value in slots.items()
    }


def _rows(x: Tensor, count: int) -> Tensor:
    """The first rows; zeros where there are fewer."""
    x = x[:count]
    return pad(x, (0,) * (2 * x.ndim - 1) + (count - x.shape[0],))
