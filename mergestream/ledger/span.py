"""The directions of all experts for one linear weight, side by side: the input of readouts.

With Δ_i = U_i Σ_i V_iᵀ, U = [U_1 … U_t] (m×κ) and V likewise, every readout has the form

    M = U Z Vᵀ,    Z (κ×κ) made of UᵀU, VᵀV, σ, ‖Δ_i‖² and the weights c_i

so that all but two products happens in κ dimensions, however large the weight is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mergestream.algebra.lowrank import LowRank
from mergestream.algebra.svd import gram, thin_svd
from mergestream.digest import combined_digest, tensor_digests

ENERGIES = ("sigma", "norm2")
"""The slots of an entry that say how much it holds: 0.1 % of its size"""


@dataclass(frozen=True)
class Entry:
    """The entry of one expert for one tensor, and the expert's weight in the merge."""

    slots: Mapping[str, Tensor]
    weight: float = 1.0

    @cached_property
    def identity(self) -> tuple[str, float]:
        """A key that depends on the content only."""
        return combined_digest(tensor_digests(self.slots)), self.weight

    @property
    def held(self) -> float:
        """The share of ‖Δ‖² that the entry holds; 1 where the tensor is kept whole, or was not changed."""
        if "sigma" not in self.slots:
            return 1.0
        energy = math.fsum(self.slots["norm2"].reshape(-1).tolist())
        held = math.fsum(self.slots["sigma"].square().reshape(-1).tolist())
        return min(held / energy, 1.0) if energy else 1.0  # an SVD of full rank may round to more


def in_order(entries: Sequence[Entry]) -> list[int]:
    """The numbers of the entries that change the tensor, in an order that does not depend on the order of arrival."""
    identities = {}
    for number, entry in enumerate(entries):
        if entry.slots:
            identities[number] = entry.identity
    return sorted(identities, key=identities.__getitem__)


@dataclass(frozen=True)
class Span:
    """κ directions, one per row; ``owner`` is the expert of each, with its ‖Δ_i‖² and its weight."""

    outputs: Tensor
    """Uᵀ (κ×m): where a direction leads, in the space of the layer's outputs"""
    sigma: Tensor
    inputs: Tensor
    """Vᵀ (κ×n): what it answers to, in the space of the layer's inputs"""
    norm2: Tensor
    weight: Tensor
    owner: Tensor

    @staticmethod
    def of(entries: Sequence[Entry], dtype: torch.dtype, transposed: bool, device: str = "cpu") -> Iterator[Span]:
        """One for each matrix of the tensor, on a device; ``transposed`` weights are stored input × output."""
        moved = in_order(entries)
        outputs, inputs = ("right", "left") if transposed else ("left", "right")
        weights = [entries[number].weight for number in moved]
        for parts in zip(*(_triplets(entries[number].slots) for number in moved), strict=True):
            sigma = [part["sigma"] for part in parts]
            norm2 = [float(part["norm2"]) for part in parts]
            counts = torch.tensor(list(map(len, sigma)))
            yield Span(
                torch.cat([part[outputs] for part in parts]).to(device, dtype),
                torch.cat(sigma).to(device),
                torch.cat([part[inputs] for part in parts]).to(device, dtype),
                torch.tensor(norm2, dtype=torch.float64).repeat_interleave(counts).to(device),
                torch.tensor(weights, dtype=torch.float64).repeat_interleave(counts).to(device),
                torch.tensor(moved).repeat_interleave(counts).to(device),
            )

    @cached_property
    def output_gram(self) -> Tensor:
        """UᵀU"""
        return gram(self.outputs.T)

    @cached_property
    def input_gram(self) -> Tensor:
        """VᵀV"""
        return gram(self.inputs.T)

    @property
    def weighted(self) -> Tensor:
        """c·σ: the diagonal of S = Σ c_i Δ_i in these directions"""
        return self.weight * self.sigma

    @property
    def mean_norm(self) -> Tensor:
        """Σ c_i ‖Δ_i‖ / Σ c_i over the experts that have moved the weight"""
        first = torch.cat([self.owner.new_tensor([-1]), self.owner[:-1]]) != self.owner
        return (self.weight * self.norm2.sqrt())[first].sum() / self.weight[first].sum()

    def damage(self, Z: Tensor) -> dict[int, float]:
        """‖(M − Δ_i)|Δ_i|‖² / ‖|Δ_i|²‖² by owner: how far M is from each expert on that expert's inputs."""
        wrong = Z[:, None] * self.input_gram if Z.ndim == 1 else Z @ self.input_gram
        wrong.diagonal().sub_(self.sigma)
        wrong *= self.sigma
        owners, which = self.owner.unique(return_inverse=True)
        missed = torch.zeros_like(owners, dtype=wrong.dtype).index_add_(
            0, which, (wrong * (self.output_gram @ wrong)).sum(0)
        )
        energy = torch.zeros_like(missed).index_add_(0, which, self.sigma.pow(4).to(wrong.dtype))
        shares = zip(owners.tolist(), missed.tolist(), energy.tolist(), strict=True)
        return {owner: part / whole for owner, part, whole in shares if whole}

    def overlap(self, experts: int) -> Tensor:
        """How much every two experts respond to the same inputs: the cosine of V_i Σ_i² V_iᵀ and V_j Σ_j² V_jᵀ; NaN
        where one of them has changed nothing."""
        return cosines(self._by_owner((self.sigma[:, None] * self.input_gram * self.sigma).square(), experts))

    def inner_products(self, experts: int) -> Tensor:
        """⟨Δ_i, Δ_j⟩ of every two experts, from their entries: Σ_ab σ_a σ_b (u_a·u_b)(v_a·v_b)."""
        return self._by_owner(self.sigma[:, None] * self.input_gram * self.output_gram * self.sigma, experts)

    def _by_owner(self, products: Tensor, experts: int) -> Tensor:
        """Sum the products of all directions by the experts that own them; expert × expert, on the CPU."""
        inner = products.new_zeros(experts, len(products)).index_add_(0, self.owner, products)
        return inner.new_zeros(experts, experts).index_add_(1, self.owner, inner).cpu()


def cosines(inner: Tensor) -> Tensor:
    """Inner products of every two experts over the norms on the diagonal; NaN where one of these is zero."""
    norms = inner.diagonal().sqrt()
    return inner / torch.outer(norms, norms)


@dataclass(frozen=True)
class Product:
    """U Z Vᵀ for a matrix Z, or for a vector that is the diagonal of Z."""

    span: Span
    coefficients: Tensor
    transposed: bool

    def dense(self) -> Tensor:
        left, right = self._factors(self.coefficients.to(self.span.outputs.dtype))
        product = left @ right
        return product.T if self.transposed else product

    def low_rank(self, dtype: torch.dtype, shape: tuple[int, ...]) -> LowRank:
        left, right = self._factors(self.coefficients)
        left, right = (right.T, left.T) if self.transposed else (left, right)
        return LowRank.from_factors(left.cpu(), right.cpu(), dtype, shape)

    def _factors(self, Z: Tensor) -> tuple[Tensor, Tensor]:
        """U Z and Vᵀ or U and Z Vᵀ, whichever takes fewer products; in Z's dtype."""
        left, right = self.span.outputs.T.to(Z.dtype), self.span.inputs.to(Z.dtype)
        if Z.ndim == 1:
            return left, Z[:, None] * right
        return (left, Z @ right) if right.shape[1] <= left.shape[0] else (left @ Z, right)


def _triplets(slots: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The directions of each matrix of an entry; a thin matrix that was kept whole is decomposed now."""
    if "delta" in slots:
        for matrix in slots["delta"] if slots["delta"].ndim == 3 else [slots["delta"]]:
            svd = thin_svd(matrix)
            yield {"left": svd.u.T, "sigma": svd.s, "right": svd.v.T, "norm2": svd.s.square().sum()}
    elif slots["left"].ndim == 2:
        yield _used(slots)
    else:
        for number in range(len(slots["norm2"])):
            yield _used({slot: value[number] for slot, value in slots.items()})


def _used(slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entry without rows that are empty because the rank is lower."""
    rank = int(slots["sigma"].count_nonzero())
    return {slot: value[:rank] if value.ndim else value for slot, value in slots.items()}
