"""The directions of all experts for one linear weight, side by side: the input of readouts.

With Δ_i = U_i Σ_i V_iᵀ, U = [U_1 … U_t] (m×κ) and V likewise, a readout has the form

    M = U Z Vᵀ,    Z (κ×κ) made of UᵀU, VᵀV, σ, ‖Δ_i‖² and the weights c_i

so that all but two products happens in κ dimensions, however large the weight is. A readout that knows the inputs of
the layer may respond to more directions than the experts do: M = U Y with any Y (κ×n).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mergestream.algebra.lowrank import LowRank
from mergestream.algebra.products import gram, multiply
from mergestream.algebra.svd import thin_svd
from mergestream.digest import combined_digest, tensor_digest
from mergestream.ledger.moment import Moment

ENERGIES = ("sigma", "norm2")
"""The slots of an entry that say how much it holds: 0.1 % of its size"""


@dataclass(frozen=True)
class Entry:
    """The entry of one expert for one tensor, and the expert's weight in the merge."""

    slots: Mapping[str, Tensor]
    weight: float = 1.0
    moment: Moment | None = None
    """Of the layer's inputs, where the expert has been calibrated"""
    is_adapter: bool = False

    @cached_property
    def identity(self) -> tuple[str, float, float, bool]:
        """A key that depends on the content only."""
        known = self.moment
        moment = {"values": known.values, "vectors": known.vectors} if known else {}
        digest = combined_digest({name: tensor_digest(part) for name, part in {**self.slots, **moment}.items()})
        return digest, self.weight, known.rest if known else 0.0, self.is_adapter

    @property
    def inputs(self) -> Moment | None:
        """The moment, unless all inputs were zero: then it says nothing of the inputs."""
        return self.moment if self.moment and self.moment.trace else None


def in_order(entries: Sequence[Entry]) -> list[int]:
    """The numbers of the entries that change the tensor or know its inputs, sorted by content: the order of arrival
    makes no difference."""
    identities = {}
    for number, entry in enumerate(entries):
        if entry.slots or entry.moment:
            identities[number] = entry.identity
    return sorted(identities, key=identities.__getitem__)


@dataclass(frozen=True)
class RightFactor:
    """Y (κ×n) of M = U Y."""

    rows: Tensor


@dataclass(frozen=True)
class Factors:
    """Z = left · right, plus a diagonal where there is one: M = (U left)(right Vᵀ) + U · diagonal · Vᵀ."""

    left: Tensor
    right: Tensor
    diagonal: Tensor | None = None

    @property
    def matrix(self) -> Tensor:
        """Z (float64)"""
        Z = self.left.double() @ self.right.double()
        return Z if self.diagonal is None else Z + torch.diag(self.diagonal.double())

    @property
    def transposed(self) -> Factors:
        return Factors(self.right.T, self.left.T, self.diagonal)

    def times(self, factor: Tensor) -> Factors:
        diagonal = None if self.diagonal is None else self.diagonal * factor
        return Factors(self.left * factor, self.right, diagonal)


Coefficients = Tensor | Factors | RightFactor
"""Z of M = U Z Vᵀ, a matrix, its factors or a vector that is its diagonal; or the right factor of M = U Y"""


@dataclass(frozen=True)
class Span:
    """κ directions, one per row; ``owner`` is the expert of each, with its ‖Δ_i‖² and its weight."""

    outputs: Tensor
    """Uᵀ (κ×m): the output of a direction"""
    sigma: Tensor
    inputs: Tensor
    """Vᵀ (κ×n): the input to which a direction responds"""
    norm2: Tensor
    weight: Tensor
    owner: Tensor
    experts: Mapping[int, Entry]
    """The entries by number, in order: also of experts that only know the layer's inputs"""

    @staticmethod
    def of(entries: Sequence[Entry], dtype: torch.dtype, transposed: bool, device: str = "cpu") -> Iterator[Span]:
        """One for each matrix of the tensor, on a device; ``transposed`` weights are stored input × output."""
        experts = {number: entries[number] for number in in_order(entries)}
        moved = [number for number, entry in experts.items() if entry.slots]
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
                experts,
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

    def squared_norm(self, Z: Factors) -> Tensor:
        """‖U Z Vᵀ‖², in the dtype of the directions"""
        dtype = self.outputs.dtype
        left, right = Z.left.to(dtype), Z.right.T.to(dtype)
        outer, inner = gram(self.outputs.T, dtype), gram(self.inputs.T, dtype)
        L, R = multiply(outer, left), multiply(inner, right)
        norm2 = (multiply(left.T, L) * multiply(right.T, R)).sum(dtype=torch.float64)
        if Z.diagonal is not None:
            products, diagonal = outer.mul_(inner), Z.diagonal.to(dtype)
            norm2 += (diagonal * (2 * L.mul_(R).sum(1) + products @ diagonal)).sum(dtype=torch.float64)
        return norm2

    @property
    def reversed(self) -> Span:
        """The span of all Δ_iᵀ: inputs and outputs change places."""
        return replace(self, outputs=self.inputs, inputs=self.outputs)

    def damage(self, coefficients: Coefficients) -> dict[int, float]:
        """How far M is from each expert on that expert's inputs, by owner.

            tr (M − Δ_i) G_i (M − Δ_i)ᵀ / tr Δ_i G_i Δ_iᵀ

        G_i is the second moment of the inputs, or |Δ_i|² where it is not known.
        """
        return self._damage_by_own_directions(coefficients) | self._damage_by_moments(coefficients)

    def right_factor(self, coefficients: Coefficients) -> Tensor:
        """Y of M = U Y, in the type of the coefficients."""
        if isinstance(coefficients, RightFactor):
            return coefficients.rows
        if isinstance(coefficients, Factors):
            coefficients = coefficients.matrix
        inputs = self.inputs.to(coefficients.dtype)
        return coefficients[:, None] * inputs if coefficients.ndim == 1 else coefficients @ inputs

    def _damage_by_moments(self, coefficients: Coefficients) -> dict[int, float]:
        known = {number: entry.inputs for number, entry in self.experts.items() if entry.inputs}
        if not known:
            return {}
        found, merged = {}, self.right_factor(coefficients)
        for number, moment in known.items():
            own = self.sigma[:, None] * self.inputs * (self.owner == number)[:, None]
            missed, whole = ((moment.apply(Y) * (self.output_gram @ Y.double())).sum() for Y in (merged - own, own))
            if whole:
                found[number] = float(missed / whole)
        return found

    def _damage_by_own_directions(self, coefficients: Coefficients) -> dict[int, float]:
        """‖(M − Δ_i)|Δ_i|‖² / ‖|Δ_i|²‖² by owner"""
        if isinstance(coefficients, RightFactor):
            wrong = coefficients.rows.double() @ self.inputs.T.double()
        elif isinstance(coefficients, Factors):
            wrong = coefficients.matrix @ self.input_gram
        elif coefficients.ndim == 1:
            wrong = coefficients[:, None] * self.input_gram
        else:
            wrong = coefficients @ self.input_gram
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
    """U Z Vᵀ or U Y."""

    span: Span
    coefficients: Coefficients
    transposed: bool

    def dense(self) -> Tensor:
        left, right = self._factors(self.span.outputs.dtype)
        product = multiply(left, right)
        return product.T if self.transposed else product

    def low_rank(self, dtype: torch.dtype, shape: tuple[int, ...]) -> LowRank:
        left, right = self._factors()
        left, right = (right.T, left.T) if self.transposed else (left, right)
        return LowRank.from_factors(left.cpu(), right.cpu(), dtype, shape)

    def _factors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """U Z and Vᵀ or U and Z Vᵀ, whichever takes fewer products; of factors U left and right Vᵀ."""
        span, Z = self.span, self.coefficients
        left, right = span.outputs.T.to(dtype), span.inputs.to(dtype)
        if isinstance(Z, RightFactor):
            return left, Z.rows.to(dtype)
        if isinstance(Z, Factors):
            L, R = Z.left.to(dtype), Z.right.to(dtype)
            if Z.diagonal is None:
                return multiply(left, L), multiply(R, right)
            diagonal = Z.diagonal.to(dtype)
            if right.shape[1] <= left.shape[0]:
                return left, multiply(L, multiply(R, right)).addcmul_(diagonal[:, None], right)
            return multiply(multiply(left, L), R).addcmul_(left, diagonal), right
        Z = Z.to(dtype)
        if Z.ndim == 1:
            return left, Z[:, None] * right
        return (left, multiply(Z, right)) if right.shape[1] <= left.shape[0] else (multiply(left, Z), right)


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
