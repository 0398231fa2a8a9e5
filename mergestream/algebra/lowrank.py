"""Matrices of low rank in factors, and the arithmetic that keeps them there (design section 3).

A LoRA adapter changes an m×n weight by a matrix of rank ρ ≪ min(m, n), and a sum of t of them has at most
rank k = tρ. Such a matrix is kept as

    M = Lᵀ C R,     L (a×m) and R (b×n) with orthonormal rows,  C (a×b) the small core.

Adding a matrix of rank ρ extends the bases by the part of its own that they do not span, at a cost of
O((m+n)kρ); all else happens in the core: ‖M‖ = ‖C‖, and M's singular values are C's. A basis only ever grows
by blocks of rows and never rotates, so that nothing is rounded twice and blocks can be shared between
matrices, and between the steps of a store.

Blocks are float32 (float64 for a float64 model). The core and nearly all intermediate results are float64 (but see
`Basis._split`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from mergestream.algebra import pieces

# The part of a unit vector outside a basis is rounding noise if it is shorter than this many times eps.
_NOISE = 16
# Elements that are multiplied out at a time; they fit into the cache.
_MULTIPLIED = 1 << 17


@dataclass(frozen=True, eq=False)
class Basis:
    """Orthonormal rows in R^length, in the blocks (r_i × length) in which they came."""

    length: int
    dtype: torch.dtype
    blocks: tuple[Tensor, ...] = ()

    @property
    def rank(self) -> int:
        return sum(block.shape[0] for block in self.blocks)

    def rows(self) -> Tensor:
        """All rows as one float64 matrix (rank × length)."""
        return torch.cat([torch.empty(0, self.length, dtype=torch.float64), *(x.double() for x in self.blocks)])

    def coordinates(self, x: Tensor) -> Tensor:
        """x Qᵀ (rows of x × rank), in the dtype of x."""
        return torch.cat([x[:, :0], *(x @ block.to(x.dtype).T for block in self.blocks)], 1)

    def combine(self, coordinates: Tensor) -> Tensor:
        """coordinates · Q (rows of coordinates × length), in the dtype of the coordinates."""
        result = coordinates.new_zeros(coordinates.shape[0], self.length)
        parts = coordinates.split([block.shape[0] for block in self.blocks], 1)
        for block, part in zip(self.blocks, parts, strict=True):
            result.addmm_(part, block.to(coordinates.dtype))
        return result

    def extend(self, x: Tensor) -> tuple[Basis, Tensor]:
        """A basis that starts with this one and spans the rows of x (float64) too; x's coordinates in it.

        Gram–Schmidt by blocks. The new rows are the right singular vectors of x's remainder outside the basis, so
        that directions with nothing but rounding noise add no row.
        """
        inside, remainder = self._split(x)
        longest = torch.linalg.vector_norm(x, dim=1).amax() if x.numel() else 0.0
        s, new = _principal_rows(remainder, self.dtype, _NOISE * torch.finfo(self.dtype).eps * longest)
        s, new = s[: self.length - self.rank], new[: self.length - self.rank]
        if s.numel() == 0:
            return self, inside
        if s[-1] < 0.5 * longest:
            # Most of x has cancelled, and rounding keeps the rest from being orthogonal: do it a second time.
            _, new = _principal_rows(self._split(new)[1], self.dtype, 0)
        block = new.to(self.dtype)
        basis = Basis(self.length, self.dtype, (*self.blocks, block))
        return basis, torch.cat([inside, remainder @ block.double().T], 1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The coordinates of x, and its remainder outside the basis.

        The coordinates are float64, because new rows are only as orthogonal to the old ones as the coordinates are
        exact. The product that is subtracted has random rounding errors, so the precision of the rows is enough.
        """
        if not self.blocks:
            return x[:, :0], x
        inside = self.coordinates(x)
        return inside, x - self.combine(inside.to(self.dtype))

    def starts_with(self, other: Basis) -> bool:
        """Whether this basis begins with the blocks of the other (the same tensor objects)."""
        ours = self.blocks[: len(other.blocks)]
        return len(ours) == len(other.blocks) and all(a is b for a, b in zip(ours, other.blocks, strict=True))


@dataclass(frozen=True, eq=False)
class LowRank:
    """M = Lᵀ C R. A tensor of more than two dimensions is the matrix with its first one as rows."""

    shape: torch.Size
    left: Basis
    core: Tensor
    right: Basis

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: torch.dtype) -> LowRank:
        rows, columns = pieces.matrix_shape(tuple(shape))
        core = torch.zeros(0, 0, dtype=torch.float64)
        return cls(torch.Size(shape), Basis(rows, dtype), core, Basis(columns, dtype))

    @classmethod
    def from_factors(
        cls, left: Tensor, right: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None
    ) -> LowRank:
        """left (m×r) · right (r×n), as a tensor of the given shape."""
        zero = cls.zeros(shape or (left.shape[0], right.shape[1]), dtype)
        left_basis, left_coordinates = zero.left.extend(left.double().T)
        right_basis, right_coordinates = zero.right.extend(right.double())
        return cls(zero.shape, left_basis, left_coordinates.T @ right_coordinates, right_basis)

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def rank(self) -> int:
        """The rank that the factors can hold; the rank of the matrix may be lower."""
        return min(self.left.rank, self.right.rank)

    def any(self) -> bool:
        return bool(self.core.any())

    def dense(self) -> Tensor:
        """The tensor itself, in the factors' dtype."""
        return self.elements()(0, self.shape.numel()).view(self.shape)

    def elements(self) -> pieces.Elements:
        """A function that multiplies out any range of the flattened tensor.

        It always multiplies the same blocks of rows, because BLAS rounds a product by its shape: every range has the
        same bits, so that a threshold found in one pass over the data fits the next.
        """
        width = max(self.right.length, 1)
        rows = max(_MULTIPLIED // width, 1)
        size = rows * width
        scaled = self.left.combine(self.core.T).to(self.dtype)
        right = self.right.rows().to(self.core.device, self.dtype)

        @lru_cache(maxsize=1)  # the next range begins where this one ends, often within a block
        def block(number: int) -> Tensor:
            return torch.mm(scaled[:, number * rows : (number + 1) * rows].T, right).view(-1)

        def between(start: int, stop: int) -> Tensor:
            numbers = range(start // size, -(-stop // size))
            parts = [block(number)[max(start - number * size, 0) : stop - number * size] for number in numbers]
            return torch.cat(parts) if parts else right.new_empty(0)

        return between

    def rebased(self, left: Basis, right: Basis) -> LowRank:
        """The same matrix in bases that start with these."""
        left, core = _rebased(self.core, self.left, left)
        right, transposed = _rebased(core.T, self.right, right)
        return LowRank(self.shape, left, transposed.T, right)

    def __add__(self, other: Value) -> Value:
        if isinstance(other, Tensor):
            return self.dense() + other
        result = other.rebased(self.left, self.right)
        result.core[: self.left.rank, : self.right.rank] += self.core
        return result

    __radd__ = __add__

    def __neg__(self) -> LowRank:
        return self * -1

    def __sub__(self, other: Value) -> Value:
        return self + -other

    def __rsub__(self, other: Tensor) -> Tensor:
        return other - self.dense()

    def __mul__(self, factor: float) -> LowRank:
        return LowRank(self.shape, self.left, self.core * factor, self.right)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> LowRank:
        return self * (1 / divisor)

    def factors(self, rank: int | None = None) -> tuple[Tensor, Tensor, float]:
        """(m×r, r×n) of equal norm, in float64, whose product is the nearest matrix of rank r, and the energy
        that it lacks (the sum of the squares of the singular values that were cut off).

        r is the numerical rank, or ``rank`` if that is less.
        """
        u, s, vh = torch.linalg.svd(self.core, full_matrices=False)
        keep = int((s > torch.finfo(self.dtype).eps * s[:1]).sum())
        keep = keep if rank is None else min(keep, rank)
        root = s[:keep].sqrt()
        left = self.left.combine((u[:, :keep] * root).T).T
        right = self.right.combine(root[:, None] * vh[:keep])
        return left, right, float(s[keep:].square().sum())


Value = Tensor | LowRank


def squared_norm(value: Value) -> float:
    """‖·‖² (Frobenius); for a matrix in factors it is the norm of the core."""
    return pieces.squared_norm(value.core if isinstance(value, LowRank) else value)


def dense(value: Value) -> Tensor:
    return value.dense() if isinstance(value, LowRank) else value


def _principal_rows(x: Tensor, dtype: torch.dtype, noise: Tensor | float) -> tuple[Tensor, Tensor]:
    """The singular values of x (float64) above the noise, descending, and the singular vectors in its row space.

    A Gram matrix squares the condition; what is rounded to float32 in the end can do with that.
    """
    if dtype == torch.float64:
        _, s, rows = torch.linalg.svd(x, full_matrices=False)
        return s[s > noise], rows[s > noise]
    squares, u = torch.linalg.eigh(x @ x.T)
    s = squares.flip(0).clamp_(min=0).sqrt_()
    rank = int((s > noise).sum())
    return s[:rank], (u.flip(1)[:, :rank] / s[:rank]).T @ x


def _rebased(core: Tensor, own: Basis, start: Basis) -> tuple[Basis, Tensor]:
    """A basis that starts with ``start`` and spans ``own``, and a new core with its rows in that basis."""
    if own.starts_with(start):
        return own, core.clone()
    if start.starts_with(own):
        return start, pad(core, (0, 0, 0, start.rank - own.rank))
    basis, coordinates = start.extend(own.rows())
    return basis, coordinates.T @ core


@dataclass(frozen=True)
class FactorBounds:
    """Upper bounds of the factors Lᵀ C R of one tensor's slots after a step."""

    shape: tuple[int, int]
    """The shape of the tensor as a matrix"""
    new: tuple[int, int]
    """Rows that the step may add to the left and to the right basis"""
    core: tuple[int, int]

    @classmethod
    def after(cls, shape: tuple[int, ...], before: Iterable[tuple[int, int]], rank: int) -> FactorBounds | None:
        """Of slots with bases of these ranks that absorb a task vector of ``rank``; None where the dense tensor
        takes no more."""
        m, n = pieces.matrix_shape(shape)
        ranks = [(0, 0), *before]
        a, b = min(max(left for left, _ in ranks) + rank, m), min(max(right for _, right in ranks) + rank, n)
        bounds = cls((m, n), (min(rank, m), min(rank, n)), (a, b))
        return bounds if bounds.stored < m * n or not a else None

    @property
    def stored(self) -> int:
        """Numbers in the factors of one slot."""
        (m, n), (a, b) = self.shape, self.core
        return m * a + a * b + n * b

    @property
    def workspace(self) -> int:
        """Bytes of float64 that absorbing takes: the new rows of both bases a few times, a dozen cores."""
        (m, n), (left, right) = self.shape, self.new
        return 8 * (4 * (m * left + n * right) + 12 * max(self.core) ** 2)
