"""The ledger: a method that keeps the leading directions of every expert's own task vector."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mergestream.algebra.lowrank import Basis, LowRank, Value, dense, squared_norm
from mergestream.algebra.svd import thin_svd
from mergestream.algebra.truncated import truncated_svd
from mergestream.methods.base import Absorbed, Context, Method, Slot, State, parameter

FEWEST = 8
"""With fewer experts than these, an entry is as long as with these"""


@dataclass(frozen=True)
class Ledger(Method):
    """Keep an entry of every expert's leading directions, and merge the entries when the model is read out.

        Δ_i = U Σ Vᵀ, and its entry keeps the first k_t = ⌊β·r / max(t, 8)⌋ triplets, r = min(m, n), and ‖Δ_i‖²

    A tensor of more dimensions is the matrix with the first as rows; a stack of linear weights is as many matrices.
    A tensor of one dimension, or one that would be cut below one direction, is kept whole. The cuts are nested: those
    of t experts begin with those of t + 1, so that cutting at every arrival equals seeing all experts at once.
    Sources: TSV (Gargiulo et al., 2025) for the cut at r/t; design section 8.
    """

    name = "ledger"
    whole = "all"
    factored = True
    commutative = True
    remembers_experts = True
    keeps_factors = False
    has_direction = False

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
        """How many directions an entry keeps of a tensor with ``cut`` experts; None where it is kept whole."""
        _, m, n = context.matrices
        rank = min(m, n)
        if len(context.shape) < 2 or self.budget * rank < FEWEST:
            return None
        return min(rank, max(1, math.floor(self.budget * rank / max(cut, FEWEST))))

    def layout(self, context: Context) -> dict[str, Slot]:
        """The slots of an entry; none where an adapter does not change the tensor."""
        if context.rank == 0:
            return {}
        kept = self.directions(context, context.t)
        return self._slots(context, kept if kept is None or context.rank is None else min(kept, context.rank))

    def layout_as_stored(self, context: Context, found: Mapping[str, tuple[int, ...]]) -> dict[str, Slot]:
        """An entry may be longer than it is read, and an adapter's may be shorter, or empty."""
        if not found:
            return {}
        kept = self.directions(context, context.t)
        return self._slots(context, None if kept is None or not found.get("sigma") else found["sigma"][-1])

    def _slots(self, context: Context, kept: int | None) -> dict[str, Slot]:
        """The slots of an entry with so many directions; None where the tensor is kept whole."""
        if kept is None:
            return {"delta": context.like}
        count, m, n = context.matrices
        stack, dtype = context.shape[: 1 if count else 0], getattr(torch, self.entries)
        return {
            "left": Slot((*stack, kept, m), dtype),
            "sigma": Slot((*stack, kept), torch.float64),
            "right": Slot((*stack, kept, n), dtype),
            "norm2": Slot(stack, torch.float64),
        }

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        """The entry of the expert, which does not depend on the experts before it."""
        layout = self.layout(context)
        if not layout:
            return Absorbed({})
        if "delta" in layout:
            return Absorbed({"delta": dense(delta)})
        # Always find as many directions as eight experts keep: then the order of arrival changes no bit.
        most = self.directions(context, FEWEST)
        assert most is not None
        count, m, n = context.matrices
        if isinstance(delta, LowRank) and not count:
            parts = [(thin_svd(delta).dense(), squared_norm(delta))]
        else:
            parts = []
            for matrix in dense(delta).reshape(count or 1, m, n):
                parts.append((truncated_svd(matrix, most, self.svd), squared_norm(matrix)))
        kept = layout["sigma"].shape[-1]
        columns = {
            "left": [_first_rows(svd.u.T, kept) for svd, _ in parts],
            "sigma": [_first_rows(svd.s, kept) for svd, _ in parts],
            "right": [_first_rows(svd.v.T, kept) for svd, _ in parts],
            "norm2": [torch.tensor(norm2, dtype=torch.float64) for _, norm2 in parts],
        }
        entry: State = {
            slot: torch.stack([value.to(form.dtype) for value in columns[slot]]).reshape(form.shape)
            for slot, form in layout.items()
        }
        return Absorbed(entry, self.direction(entry, context))

    def entry_rank(self, rank: int | None) -> int | None:
        return rank

    def cut(self, t: int) -> int:
        return max(t, FEWEST)

    def shortened(self, entry: Mapping[str, Tensor], context: Context) -> Mapping[str, Tensor]:
        return cut_entry(entry, self.directions(context, context.t))

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

    def carry(
        self, deltas: Iterable[Value], contexts: Sequence[Context], device: str
    ) -> tuple[list[float | None], Tensor]:
        """Make the entries of all experts as they are with all of them, and read them out by ``agree``."""
        from mergestream.ledger.merge import merge_entries
        from mergestream.ledger.readouts.agree import Agree
        from mergestream.ledger.span import Entry

        entries: list[Entry] = []
        kept2: list[float | None] = []
        for delta, context in zip(deltas, contexts, strict=True):
            absorbed = self.absorb(None, delta, dataclasses.replace(context, t=len(contexts)))
            entries.append(Entry({slot: dense(value).cpu() for slot, value in absorbed.state.items()}))
            kept2.append(None if absorbed.kept is None else squared_norm(absorbed.kept))
        return kept2, dense(merge_entries(Agree(), entries, contexts[-1], device=device))


def cut_entry(slots: Mapping[str, Tensor], kept: int | None) -> dict[str, Tensor]:
    """An entry with at most so many directions: a prefix of what it has."""
    lengths = {"left": -2, "sigma": -1, "right": -2}
    return {
        slot: value.narrow(lengths[slot], 0, min(kept, value.shape[lengths[slot]]))
        if slot in lengths and kept is not None
        else value
        for slot, value in slots.items()
    }


def _first_rows(x: Tensor, count: int) -> Tensor:
    """The first rows; zeros where there are fewer."""
    x = x[:count]
    return pad(x, (0,) * (2 * x.ndim - 1) + (count - x.shape[0],))
