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
"""A full fine-tune gets at most the share of one of eight experts, also where there are fewer"""


@dataclass(frozen=True)
class Ledger(Method):
    """Keep an entry of every expert's leading directions, and merge the entries when the model is read out.

        Δ_i = U Σ Vᵀ, and its entry keeps the first min(d_i, k) triplets and ‖Δ_i‖²        r = min(m, n)
        k = the largest number with Σ_i min(d_i, k) ≤ β·r

    d_i is the rank that the expert wants: the rank of an adapter, else ⌊β·r/8⌋. So no adapter is cut while there is
    room, and t full fine-tunes keep ⌊β·r / max(t, 8)⌋ triplets each. k only falls as experts arrive, so cutting at
    every arrival gives the same entries as cutting once with all experts.

    A convolution is the matrix with its first dimension as rows. It is much wider than high, so it keeps β·2mn/(m + n)
    directions instead of β·r: they take the same share of its size as those of a square matrix. A stack of linear
    weights counts as several matrices.
    A tensor of one dimension, or one with β·r < 8, is kept whole.
    Sources: TSV (Gargiulo et al., 2025) for the cut at r/t; design section 8.
    """

    name = "ledger"
    whole = "all"
    factored = True
    commutative = True
    keeps_entries = True

    budget: float = parameter(
        1.0, "β: of a matrix of rank r all experts together keep β·r directions", above=0, at_most=8
    )
    entries: Literal["bfloat16", "float32"] = parameter(
        "bfloat16", "the type in which directions are kept", choices=("bfloat16", "float32")
    )
    svd: Literal["auto", "exact", "randomised"] = parameter(
        "auto", "how they are found: by the size of the matrix, or always so", choices=("auto", "exact", "randomised")
    )

    def is_cut(self, context: Context) -> bool:
        """Whether entries keep directions of a tensor; else they keep it whole."""
        return len(context.shape) >= 2 and self.budget * min(context.matrices[1:]) >= FEWEST

    def capacity(self, context: Context) -> float:
        """How many directions all experts together keep with a budget of 1: r, or more of a convolution."""
        _, m, n = context.matrices
        is_convolution = not context.linear and len(context.shape) > 2
        return 2 * m * n / (m + n) if is_convolution else min(m, n)

    def wanted_rank(self, context: Context) -> int:
        """d: how many directions an expert wants to keep, by the rank of its Δ (None for a full fine-tune)."""
        return self.share(context, FEWEST) if context.rank is None else min(context.rank, *context.matrices[1:])

    def share(self, context: Context, count: int) -> int:
        """The share of one of ``count`` experts, if all of them get the same; at least 1."""
        rank = min(context.matrices[1:])
        return min(rank, max(1, math.floor(self.budget * self.capacity(context) / max(count, FEWEST))))

    def kept_rank(self, context: Context, wanted_ranks: Iterable[int]) -> int:
        """k: the largest number with Σ min(d, k) ≤ β·r; at least 1."""
        waiting = sorted(wanted_ranks)
        room = self.budget * self.capacity(context)
        for done, wanted in enumerate(waiting):
            level = math.floor(room / (len(waiting) - done))
            if level < wanted:
                return max(1, level)
            room -= wanted
        return max(waiting, default=1)

    def lengths(
        self, context: Context, found: Mapping[str, tuple[int, ...]], is_adapter: bool = False
    ) -> tuple[int, int]:
        """How many directions an entry with slots of these shapes has, and how many its expert wants.

        An adapter's rank is the number of its singular values: all are kept, also where the directions are cut.
        """
        if "left" not in found:
            return 0, 0
        return found["left"][-2], found["sigma"][-1] if is_adapter else self.wanted_rank(context)

    def layout(self, context: Context) -> dict[str, Slot]:
        """The slots of an entry; none where an adapter does not change the tensor."""
        if context.rank == 0:
            return {}
        if not self.is_cut(context):
            return {"delta": context.like}
        wanted = self.wanted_rank(context)
        return self._slots(context, min(wanted, self.kept_rank(context, (*context.others, wanted))), wanted)

    def layout_as_stored(self, context: Context, found: Mapping[str, tuple[int, ...]]) -> dict[str, Slot]:
        """The slots of an entry with the ranks that were found; before 0.3 it had no more σ than directions."""
        if not found:
            return {}
        if not self.is_cut(context):
            return {"delta": context.like}
        wanted = min((*found.get("sigma", ())[-1:], *context.matrices[1:]))
        return self._slots(context, min((*found.get("left", ())[-2:-1], wanted)), wanted)

    def _slots(self, context: Context, kept: int, wanted: int) -> dict[str, Slot]:
        """The slots of an entry with ``kept`` of the directions that the expert wants, and all their σ."""
        count, m, n = context.matrices
        stack, dtype = context.shape[: 1 if count else 0], getattr(torch, self.entries)
        return {
            "left": Slot((*stack, kept, m), dtype),
            "sigma": Slot((*stack, wanted), torch.float64),
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
        # Always find as many directions as the expert wants: then the order of arrival changes no bit.
        most = self.wanted_rank(context)
        count, m, n = context.matrices
        if isinstance(delta, LowRank) and not count:
            parts = [(thin_svd(delta).dense(), squared_norm(delta))]
        else:
            parts = []
            for matrix in dense(delta).reshape(count or 1, m, n):
                parts.append((truncated_svd(matrix, most, self.svd), squared_norm(matrix)))
        kept = layout["left"].shape[-2]
        columns = {
            "left": [_first_rows(svd.u.T, kept) for svd, _ in parts],
            "sigma": [_first_rows(svd.s, most) for svd, _ in parts],
            "right": [_first_rows(svd.v.T, kept) for svd, _ in parts],
            "norm2": [torch.tensor(norm2, dtype=torch.float64) for _, norm2 in parts],
        }
        entry: State = {
            slot: torch.stack([value.to(form.dtype) for value in columns[slot]]).reshape(form.shape)
            for slot, form in layout.items()
        }
        return Absorbed(entry, self.direction(entry, context))

    def cut(self, t: int) -> int:
        return max(t, FEWEST)

    def direction(self, state: State, context: Context) -> Value:
        """The expert's task vector as its entry has it."""
        if not state:
            return LowRank.zeros(context.shape, context.dtype)
        if "delta" in state:
            return state["delta"]
        left, sigma, right = (dense(state[slot]) for slot in ("left", "sigma", "right"))
        sigma = sigma[..., : left.shape[-2]]
        if left.ndim == 3:
            return (left.mT.to(context.dtype) * sigma[:, None].to(context.dtype)) @ right.to(context.dtype)
        bases = (Basis(rows.shape[1], context.dtype, (rows,)) for rows in (left, right))
        return LowRank(torch.Size(context.shape), next(bases), torch.diag(sigma), next(bases))

    def absorb_whole(
        self, deltas: Iterable[Value], contexts: Sequence[Context], device: str
    ) -> tuple[list[float | None], Tensor]:
        """Make the entries that a ledger of all these experts has, and merge them by ``agree``."""
        from mergestream.ledger.merge import merge_entries
        from mergestream.ledger.readouts.agree import Agree
        from mergestream.ledger.span import Entry

        entries: list[Entry] = []
        kept2: list[float | None] = []
        wanted_ranks = tuple(map(self.wanted_rank, contexts))
        level = self.kept_rank(contexts[0], wanted_ranks)
        for number, (delta, context) in enumerate(zip(deltas, contexts, strict=True)):
            others = wanted_ranks[:number] + wanted_ranks[number + 1 :]
            absorbed = self.absorb(None, delta, dataclasses.replace(context, others=others))
            slots = {slot: dense(value).cpu() for slot, value in absorbed.state.items()}
            entries.append(Entry(cut_entry(slots, level)))
            kept2.append(None if absorbed.kept is None else squared_norm(absorbed.kept))
        return kept2, dense(merge_entries(Agree(), entries, contexts[-1], device=device))


def cut_entry(slots: Mapping[str, Value], kept: int | None = None) -> dict[str, Tensor]:
    """An entry with at most ``kept`` directions: a prefix of what it has. A tensor that is kept whole stays whole."""
    entry = {slot: value for slot, value in slots.items() if isinstance(value, Tensor)}
    for slot, dimension in {"left": -2, "sigma": -1, "right": -2}.items():
        if slot in entry and kept is not None:
            entry[slot] = entry[slot].narrow(dimension, 0, min(kept, entry[slot].shape[dimension]))
    return entry


def _first_rows(x: Tensor, count: int) -> Tensor:
    """The first rows; zeros where there are fewer."""
    x = x[:count]
    return pad(x, (0,) * (2 * x.ndim - 1) + (count - x.shape[0],))
