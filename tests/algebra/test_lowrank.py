"""Low-rank matrices in factors: the same numbers as the dense matrices that they stand for."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mergestream.algebra.lowrank import Basis, LowRank, dense, squared_norm
from mergestream.algebra.projection import Projection, project, project_dense, protected_directions
from mergestream.algebra.svd import thin_svd

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def random_factors(m: Any, n: Any, rank: Any, seed: Any = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    decay = torch.arange(1, rank + 1, dtype=torch.float64) ** -0.5
    left = torch.randn(m, rank, generator=generator, dtype=torch.float64) * decay
    return left, torch.randn(rank, n, generator=generator, dtype=torch.float64)


def random_pair(m: Any, n: Any, rank: Any, dtype: Any, seed: Any = 0) -> Any:
    """A matrix in factors, and the same one dense in float64."""
    left, right = (factor.to(dtype) for factor in random_factors(m, n, rank, seed))
    return LowRank.from_factors(left, right, dtype), left.double() @ right.double()


def relative_error(value: Any, expected: Any) -> Any:
    return float((dense(value).double() - expected).norm() / expected.norm())


def assert_orthonormal(basis: Basis, units: int = 32) -> None:
    gram = basis.rows() @ basis.rows().T
    assert bool(((gram - torch.eye(basis.rank)).abs() < units * torch.finfo(basis.dtype).eps).all())


@DTYPES
def test_algebra_equals_the_dense_algebra(dtype: Any) -> None:
    (a, A), (b, B) = random_pair(30, 40, 5, dtype, 1), random_pair(30, 40, 7, dtype, 2)
    for value, expected in [
        (a + b, A + B),
        (a - b, A - B),
        (-a, -A),
        (a * 3, 3 * A),
        (0.25 * a, A / 4),
        (a / 4, A / 4),
        (a * 2 + b / 3 - a, A + B / 3),
        (a + b + b + a, 2 * A + 2 * B),
    ]:
        assert isinstance(value, LowRank)
        assert value.shape == (30, 40)
        assert value.dtype == dtype == value.dense().dtype
        assert relative_error(value, expected) < TOLERANCE[dtype]
        assert squared_norm(value) == pytest.approx(float(expected.square().sum()), rel=TOLERANCE[dtype])
        assert_orthonormal(value.left)
        assert_orthonormal(value.right)


@DTYPES
def test_with_a_dense_matrix_the_result_is_dense(dtype: Any) -> None:
    a, A = random_pair(30, 40, 5, dtype)
    T = torch.randn(30, 40, dtype=dtype)
    for value, expected in [(a + T, A + T), (T + a, A + T), (a - T, A - T), (T - a, T - A)]:
        assert isinstance(value, torch.Tensor)
        assert relative_error(value, expected) < TOLERANCE[dtype]


@DTYPES
def test_bases_grow_only_by_what_is_new(dtype: Any) -> None:
    a, A = random_pair(30, 40, 5, dtype, 1)
    left, right = random_factors(30, 40, 5, 1)
    again = LowRank.from_factors(left.to(dtype), right.to(dtype), dtype)
    total = a + again * 0.5 - a * 0.25
    assert (total.left.rank, total.right.rank) == (5, 5)
    assert relative_error(total, 1.25 * A) < TOLERANCE[dtype]
    same_right = LowRank.from_factors(torch.randn(30, 5, dtype=dtype), random_factors(30, 40, 5, 1)[1].to(dtype), dtype)
    assert ((a + same_right).left.rank, (a + same_right).right.rank) == (10, 5)


@DTYPES
def test_nearly_dependent_factors_stay_accurate(dtype: Any) -> None:
    """A remainder far smaller than the factor it comes from must still be orthogonal to the basis."""
    left, right = random_factors(200, 100, 6, 3)
    a = LowRank.from_factors(left.to(dtype), right.to(dtype), dtype)
    tilted = left + 1e-4 * torch.randn(200, 6, dtype=torch.float64)
    b = LowRank.from_factors(tilted.to(dtype), right.to(dtype), dtype)
    total = a + b
    assert isinstance(total, LowRank)
    assert_orthonormal(total.left)
    expected = left.to(dtype).double() @ right.to(dtype).double()
    expected = expected + tilted.to(dtype).double() @ right.to(dtype).double()
    assert relative_error(total, expected) < TOLERANCE[dtype]


@DTYPES
def test_rank_never_exceeds_the_matrix(dtype: Any) -> None:
    total, expected = random_pair(12, 40, 5, dtype, 0)
    for seed in range(1, 8):
        a, A = random_pair(12, 40, 5, dtype, seed)
        total, expected = total + a, expected + A
    assert total.left.rank == 12
    assert total.right.rank == 40
    assert relative_error(total, expected) < TOLERANCE[dtype]


def test_zeros_hold_nothing_and_change_nothing() -> None:
    a, _ = random_pair(30, 40, 5, torch.float32)
    zero = LowRank.zeros((30, 40), torch.float32)
    assert zero.left.rank == zero.right.rank == zero.core.numel() == 0
    assert not zero.any()
    assert a.any()
    assert not zero.dense().any()
    for value in (a + zero, zero + a):
        assert torch.equal(value.dense(), a.dense())
    assert not (zero + zero).any()
    assert LowRank.zeros((), torch.float32).dense().shape == ()
    assert zero.factors(3)[0].shape[1] == 0
    flat = LowRank.from_factors(torch.zeros(30, 4), torch.randn(4, 40), torch.float32)
    assert not flat.any()


@DTYPES
def test_an_element_is_the_same_to_the_last_bit_in_whatever_range(dtype: Any) -> None:
    low, _ = random_pair(700, 601, 3, dtype)
    elements, whole = low.elements(), low.dense().reshape(-1)
    for start, stop in ((0, 1), (601 * 436 - 1, 601 * 437), (1000, 1064), (262_144, 420_700), (420_699, 420_700)):
        assert torch.equal(elements(start, stop), whole[start:stop])
    elements(0, 10).zero_()
    assert torch.equal(elements(0, 20), whole[:20]), "ranges are in memory of their own"


def test_more_dimensions_are_a_matrix_of_the_first() -> None:
    left, right = random_factors(8, 3 * 5 * 5, 2)
    kernel = LowRank.from_factors(left, right, torch.float64, (8, 3, 5, 5))
    assert kernel.ndim == 4
    assert torch.allclose(kernel.dense(), (left @ right).reshape(8, 3, 5, 5))


@DTYPES
def test_truncation_is_the_nearest_matrix_and_tells_what_it_lacks(dtype: Any) -> None:
    (a, A), (b, B) = random_pair(30, 40, 5, dtype, 1), random_pair(30, 40, 7, dtype, 2)
    u, s, vh = torch.linalg.svd(A + B)
    left, right, lost = (a + b).factors(4)
    assert left.shape[1] == right.shape[0] == 4
    assert relative_error(left @ right, u[:, :4] * s[:4] @ vh[:4]) < TOLERANCE[dtype]
    assert lost == pytest.approx(float(s[4:].square().sum()), rel=TOLERANCE[dtype])
    left, right, lost = (a + b).factors()
    assert left.shape == (30, 12)
    assert right.shape == (12, 40)
    assert lost < 1e-12
    assert relative_error(left @ right, A + B) < TOLERANCE[dtype]
    assert float(left.norm()) == pytest.approx(float(right.norm()))


def test_truncation_finds_the_numerical_rank() -> None:
    a, A = random_pair(30, 40, 5, torch.float32, 1)
    b, _ = random_pair(30, 40, 7, torch.float32, 2)
    left, right, _ = (a + b - b).factors(12)
    assert left.shape[1] == right.shape[0] == 5
    assert relative_error(left @ right, A) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("projection", ["reference", "paper", "block"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (70, 70)])
def test_chains_of_projections_equal_the_dense_formula(
    projection: Projection, alpha: float, shape: tuple[int, int]
) -> None:
    """20 steps of OPCM, adapters of differing ranks, in float64 elementwise (design section 3)."""
    S: LowRank | None = None
    D: Tensor | None = None
    for t in range(20):
        delta, plain = random_pair(*shape, 1 + t % 3, torch.float64, seed=t)
        if S is None or D is None:
            S, D = delta, plain
            continue
        svd, reference = thin_svd(S), thin_svd(D)
        q = protected_directions(svd.s, alpha)
        assert q == protected_directions(reference.s, alpha)
        kept, plain_kept = project(delta, svd, q, projection), project_dense(plain, reference, q, projection)
        assert isinstance(kept, LowRank)
        if projection != "block":
            inner = float((kept.dense() * D).sum())
            assert abs(inner) < 1e-12 * float(D.norm() * plain.norm())
        total = S + kept
        assert isinstance(total, LowRank)
        S, D = total, D + plain_kept
    assert S is not None
    assert S.rank == sum(1 + t % 3 for t in range(20))
    assert relative_error(S, D) < 1e-9


def test_twenty_float32_steps_stay_within_1e_5_of_float64() -> None:
    for projection in ("reference", "block"):
        S: LowRank | None = None
        D: Tensor | None = None
        for t in range(20):
            delta, plain = random_pair(256, 384, 8, torch.float32, seed=t)
            if S is None or D is None:
                S, D = delta, plain
                continue
            svd, reference = thin_svd(S), thin_svd(D)
            q = protected_directions(svd.s, 0.5)
            total = S + project(delta, svd, q, projection)
            assert isinstance(total, LowRank)
            S, D = total, D + project_dense(plain, reference, q, projection)
        assert relative_error(S, D) < 1e-5


@DTYPES
@pytest.mark.parametrize("projection", ["reference", "paper", "block"])
def test_mixed_dense_and_factored_projections(dtype: Any, projection: Projection) -> None:
    (a, A), (b, B) = random_pair(30, 40, 5, dtype, 1), random_pair(30, 40, 7, dtype, 2)
    q = 2
    expected = project(B, thin_svd(A), q, projection)
    for delta, state in [(b, a), (b, A.to(dtype)), (B.to(dtype), a), (B.to(dtype), A.to(dtype))]:
        kept = project(delta, thin_svd(state), q, projection)
        assert isinstance(kept, LowRank) == (isinstance(delta, LowRank) and isinstance(state, LowRank))
        assert relative_error(kept, expected) < 10 * TOLERANCE[dtype]


def test_projection_from_a_zero_state_keeps_everything() -> None:
    delta, plain = random_pair(30, 40, 5, torch.float64)
    svd = thin_svd(LowRank.zeros((30, 40), torch.float64))
    assert protected_directions(svd.s, 0.5) == 0
    for projection in ("reference", "paper", "block"):
        assert relative_error(project(delta, svd, 0, projection), plain) < 1e-13


def test_a_duplicate_adds_no_rank() -> None:
    a, A = random_pair(64, 48, 4, torch.float32)
    S = a
    for _ in range(5):
        again = random_pair(64, 48, 4, torch.float32)[0]
        svd = thin_svd(S)
        S = S + project(again, svd, protected_directions(svd.s, 0.5), "reference")
    assert S.rank == 4
    assert relative_error(S, A) < 1e-5  # in the singular vectors of S, what S holds is all diagonal


class Pair(NamedTuple):
    """A matrix in factors beside the same one in float64."""

    value: LowRank
    expected: Tensor
    size: float
    """The norms of all that has gone into it: what rounding errors are relative to, should it all cancel"""

    @property
    def tolerance(self) -> float:
        return 16 * TOLERANCE[self.value.dtype] * self.size

    def check(self) -> None:
        assert float((self.value.dense().double() - self.expected).norm()) <= self.tolerance
        assert squared_norm(self.value) ** 0.5 == pytest.approx(float(self.expected.norm()), abs=self.tolerance)
        for basis in (self.value.left, self.value.right):
            assert_orthonormal(basis, units=256)  # LAPACK's singular vectors of tiny matrices are off by 50 at times
        assert self.value.left.rank <= self.expected.shape[0]
        assert self.value.right.rank <= self.expected[0].numel()


SHAPES = st.sampled_from([(1, 1), (1, 9), (9, 1), (5, 5), (4, 12), (12, 4), (6, 2, 3), (10, 10)])
RANKS = st.integers(0, 14)
FACTORS = st.floats(-3, 3).filter(lambda factor: abs(factor) > 0.01)
STEPS = st.lists(st.tuples(st.sampled_from(["+", "-", "*", "/", "rebased", "truncate"]), RANKS, FACTORS), max_size=6)


def drawn_pair(shape: Any, rank: Any, dtype: Any, generator: Any) -> Pair:
    m, n = shape[0], torch.Size(shape[1:]).numel()
    left = torch.randn(m, rank, generator=generator, dtype=torch.float64).to(dtype)
    right = torch.randn(rank, n, generator=generator, dtype=torch.float64).to(dtype)
    expected = (left.double() @ right.double()).view(shape)
    return Pair(LowRank.from_factors(left, right, dtype, shape), expected, float(left.norm() * right.norm()))


def after(pair: Pair, operation: str, other: Pair, factor: float) -> Pair:
    """The same operation in factors and dense."""
    value, expected, size = pair
    match operation:
        case "+":
            total = value + other.value
            assert isinstance(total, LowRank)
            return Pair(total, expected + other.expected, size + other.size)
        case "-":
            difference = value - other.value
            assert isinstance(difference, LowRank)
            return Pair(difference, expected - other.expected, size + other.size)
        case "*":
            return Pair(value * factor, expected * factor, size * abs(factor))
        case "/":
            return Pair(value / factor, expected / factor, size / abs(factor))
        case "rebased":
            rebased = value.rebased(other.value.left, other.value.right)
            assert rebased.left.starts_with(other.value.left) and rebased.right.starts_with(other.value.right)
            return Pair(rebased, expected, size)
        case _:
            left, right, _ = value.factors()
            return Pair(LowRank.from_factors(left, right, value.dtype, value.shape), expected, size)


@settings(max_examples=200)
@given(SHAPES, RANKS, STEPS, st.sampled_from([torch.float32, torch.float64]), st.integers(0, 2**32))
def test_any_arithmetic_equals_the_dense_arithmetic(shape: Any, rank: Any, steps: Any, dtype: Any, seed: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    pair = drawn_pair(shape, rank, dtype, generator)
    pair.check()
    for operation, other_rank, factor in steps:
        pair = after(pair, operation, drawn_pair(shape, other_rank, dtype, generator), factor)
        pair.check()


@settings(max_examples=100)
@given(SHAPES, RANKS, RANKS, st.sampled_from([torch.float32, torch.float64]), st.integers(0, 2**32), st.data())
def test_elements_and_factors_of_any_rank_are_those_of_the_matrix(
    shape: Any, rank: Any, cut: Any, dtype: Any, seed: Any, data: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pair = after(drawn_pair(shape, rank, dtype, generator), "+", drawn_pair(shape, 2, dtype, generator), 1)
    value, expected, _ = pair
    flat = expected.reshape(-1)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(flat))] * 2), label="range"))
    torch.testing.assert_close(value.elements()(start, stop).double(), flat[start:stop], rtol=0, atol=pair.tolerance)

    matrix = expected.reshape(shape[0], -1)
    s = torch.linalg.svdvals(matrix)
    left, right, lost = value.factors(cut)
    assert left.shape[1] == right.shape[0] <= min(cut, *matrix.shape)
    missing = float((matrix - left @ right).square().sum())
    assert missing == pytest.approx(float(s[cut:].square().sum()), rel=1e-3, abs=pair.tolerance**2)
    assert lost == pytest.approx(missing, rel=1e-3, abs=pair.tolerance**2)
    assert float(left.norm()) == pytest.approx(float(right.norm()), abs=pair.tolerance)
