"""The decomposition and the three projections, against the formula written with all terms uᵢ vⱼᵀ in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mergestream.algebra import symmetric
from mergestream.algebra.projection import project_dense, protected_directions
from mergestream.algebra.svd import RANK_TOLERANCE, thin_svd

SHAPES = [(24, 60), (40, 40), (60, 24), (1, 7), (7, 1), (1, 1), (2, 2)]
PROJECTIONS = ["reference", "paper", "block"]
DTYPES = [torch.float32, torch.float64]


def keep_terms(S: Any, delta: Any, alpha: Any, projection: Any) -> Any:
    """Σ over the kept i, j of (uᵢᵀ Δ vⱼ) uᵢ vⱼᵀ, U and V complete."""
    tolerance = RANK_TOLERANCE[S.dtype]
    S, delta = S.double(), delta.double()
    u, s, vh = torch.linalg.svd(S, full_matrices=True)
    k = sum(1 for sigma in s.tolist() if sigma > tolerance * float(s[0]))
    q = 0
    while k and float(s[: q + 1].sum()) < alpha * float(s[:k].sum()):
        q += 1
    i, j = torch.arange(S.shape[0])[:, None], torch.arange(S.shape[1])
    removed = (i < q) | (j < q) if projection == "paper" else (i < q) & (j < q)
    if projection != "block":
        removed = removed | ((i == j) & (i < k))
    return u @ torch.where(removed, 0, u.T @ delta @ vh.T) @ vh


def randn(*shape: Any, seed: Any, dtype: Any = torch.float64) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_spectrum(m: Any, n: Any, s: Any, seed: Any, dtype: Any = torch.float32) -> Any:
    u = torch.linalg.qr(randn(m, len(s), seed=seed)).Q
    v = torch.linalg.qr(randn(n, len(s), seed=seed + 1)).Q
    return ((u * s) @ v.T).to(dtype)


def power_law(count: Any, exponent: Any) -> Any:
    return torch.arange(1, count + 1, dtype=torch.float64) ** -exponent


def projected(S: Any, delta: Any, alpha: Any, projection: Any) -> Any:
    protected = partial(protected_directions, alpha=alpha)
    svd = thin_svd(S, leading=protected) if projection == "block" else thin_svd(S)
    return project_dense(delta, svd, protected(svd.s), projection)


def relative(error: Any, reference: Any) -> Any:
    return float(error.double().norm() / reference.double().norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_sum_of_the_kept_terms(shape: Any, projection: Any, alpha: float, dtype: Any) -> None:
    S, delta = randn(*shape, seed=1, dtype=dtype), randn(*shape, seed=2, dtype=dtype)
    result = projected(S, delta, alpha, projection)
    assert result.dtype == dtype and result.is_contiguous()
    atol = 3e-5 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(result.double(), keep_terms(S, delta, alpha, projection), rtol=0, atol=atol)


@pytest.mark.parametrize("shape", [(24, 60), (40, 40), (60, 24)])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rank_deficient_state_loses_the_diagonal_only_where_it_has_one(
    shape: tuple[int, int], projection: Any, alpha: float, dtype: Any
) -> None:
    S = with_spectrum(*shape, power_law(5, 0.5), seed=3, dtype=dtype)
    delta = randn(*shape, seed=4, dtype=dtype)
    assert thin_svd(S).rank == 5
    atol = 3e-5 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(
        projected(S, delta, alpha, projection).double(), keep_terms(S, delta, alpha, projection), rtol=0, atol=atol
    )


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_state_projects_nothing(projection: Any, dtype: Any) -> None:
    delta = randn(6, 9, seed=5, dtype=dtype)
    svd = thin_svd(torch.zeros(6, 9, dtype=dtype))
    assert svd.rank == 0 and protected_directions(svd.s, 0.5) == 0
    assert torch.equal(project_dense(delta, svd, 0, projection), delta)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_svd_is_orthonormal_descending_and_gives_the_matrix_back(shape: Any, dtype: Any) -> None:
    S = randn(*shape, seed=6, dtype=dtype)
    svd = thin_svd(S)
    eye = torch.eye(svd.rank, dtype=dtype)
    atol = 1e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(svd.u.T @ svd.u, eye, rtol=0, atol=atol)
    torch.testing.assert_close(svd.v.T @ svd.v, eye, rtol=0, atol=atol)
    torch.testing.assert_close((svd.u * svd.s.to(dtype)) @ svd.v.T, S, rtol=0, atol=atol)
    assert svd.s.dtype == torch.float64 and bool((svd.s.diff() <= 0).all())


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_kept_is_kept_again(projection: Any, dtype: Any) -> None:
    S, delta = randn(30, 50, seed=7, dtype=dtype), randn(30, 50, seed=8, dtype=dtype)
    once = projected(S, delta, 0.5, projection)
    twice = projected(S, once, 0.5, projection)
    assert relative(twice - once, once) < (1e-5 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("projection", ["reference", "paper"])
@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_nothing_is_kept_along_the_state_nor_of_it(projection: str, exponent: float) -> None:
    S = with_spectrum(120, 90, power_law(90, exponent), seed=9)
    delta = randn(120, 90, seed=10, dtype=torch.float32) / 90 + S
    kept = projected(S, delta, 0.5, projection).double()
    assert abs(float((kept * S.double()).sum())) <= 1e-6 * float(delta.norm() * S.norm())
    assert relative(projected(S, S, 0.5, projection), S) < 1e-5


@pytest.fixture(params=["inverse iteration", "divide and conquer", "torch alone"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How leading vectors are found: as in large matrices, as in small ones, and where NumPy brings no LAPACK."""
    if request.param == "inverse iteration":
        monkeypatch.setattr(symmetric, "_LEAST_SIZE", 0)
    if request.param == "torch alone":
        monkeypatch.setattr(symmetric, "_lapack", lambda: None)


@pytest.mark.parametrize("shape", [(60, 24), (24, 60)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 4, 5, 24])
@pytest.mark.usefixtures("way")
def test_leading_vectors_are_the_first_of_all(count: int, dtype: Any, shape: Any) -> None:
    S = randn(*shape, seed=12, dtype=dtype)
    every, leading = thin_svd(S), thin_svd(S, leading=lambda s: min(count, len(s)))
    torch.testing.assert_close(leading.s, every.s)
    for few, all_of_them in ((leading.u, every.u), (leading.v, every.v)):
        assert few.shape[1] == count
        torch.testing.assert_close(few.abs(), all_of_them[:, :count].abs(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [1, 4, 12])
@pytest.mark.parametrize("state", ["orthogonal", "of equal blocks", "of rank one", "zero"])
@pytest.mark.usefixtures("way")
def test_leading_vectors_are_orthonormal_where_singular_values_are_equal(state: str, count: int) -> None:
    S = {
        "orthogonal": torch.linalg.qr(randn(24, 24, seed=15, dtype=torch.float64))[0].float(),
        "of equal blocks": torch.block_diag(*[torch.ones(4, 4)] * 6),
        "of rank one": torch.ones(24, 24),
        "zero": torch.zeros(24, 24),
    }[state]
    svd = thin_svd(S, leading=lambda s: min(count, len(s)))
    leading = min(count, {"orthogonal": 24, "of equal blocks": 6, "of rank one": 1, "zero": 0}[state])
    for vectors in (svd.u, svd.v):
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(leading), rtol=0, atol=1e-5)
    torch.testing.assert_close(S @ svd.v, svd.u * svd.s[:leading].float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("exponent", [0.3, 0.7, 1.5])
def test_no_subnormal_number_is_rotated(exponent: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many processors are a hundred times slower with them: leading vectors would cost more than all."""
    S = with_spectrum(512, 512, power_law(512, exponent), seed=22)
    ormqr = torch.ormqr
    subnormal: list[int] = []

    def watched(*factors: Any) -> Any:
        subnormal.extend(int(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum()) for x in factors)
        return ormqr(*factors)

    monkeypatch.setattr(torch, "ormqr", watched)
    thin_svd(S, leading=lambda s: 64)
    assert subnormal == [0, 0, 0]


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("shape", [(8, 6), (16, 16), (24, 16), (16, 24)])
def test_it_does_not_matter_where_the_state_lies_in_memory(shape: Any, projection: Any) -> None:
    S, delta = randn(*shape, seed=13, dtype=torch.float32), randn(*shape, seed=14, dtype=torch.float32)
    expected = projected(S, delta, 0.5, projection)
    for offset in (1, 2, 5):
        elsewhere = torch.empty(S.numel() + 16)[offset : offset + S.numel()].view(shape).copy_(S)
        assert torch.equal(projected(elsewhere, delta, 0.5, projection), expected)


def test_block_keeps_the_state_beside_the_protected_directions() -> None:
    S = with_spectrum(50, 40, power_law(40, 0.5), seed=11, dtype=torch.float64)
    q = protected_directions(thin_svd(S).s, 0.5)
    expected = power_law(40, 0.5)[q:].norm()
    torch.testing.assert_close(projected(S, S, 0.5, "block").norm(), expected)


@pytest.mark.parametrize("shape", [(192, 192), (320, 128), (128, 320)])
@pytest.mark.parametrize(
    ("exponent", "tolerance"),
    [(0.3, 1e-5), (0.7, 1e-5), (1.0, 1e-5), (1.5, 1e-5), (2.0, 5e-5)],  # 2: steeper than fine-tuning makes them
)
def test_float32_is_within_1e_5_of_the_float64_formula(
    shape: tuple[int, int], exponent: float, tolerance: float
) -> None:
    S = with_spectrum(*shape, power_law(min(shape), exponent), seed=12)
    delta = with_spectrum(*shape, power_law(min(shape), 0.7), seed=14) + S / 3
    exact = keep_terms(S, delta, 0.5, "reference")
    assert relative(projected(S, delta, 0.5, "reference") - exact, exact) < tolerance


def test_float32_stays_within_1e_5_on_sums_of_several_steps() -> None:
    S = with_spectrum(160, 160, power_law(160, 0.7), seed=20)
    for step in range(1, 6):
        delta = with_spectrum(160, 160, power_law(160, 0.7), seed=20 + 2 * step)
        exact, kept = keep_terms(S, delta, 0.5, "reference"), projected(S, delta, 0.5, "reference")
        assert relative(kept - exact, exact) < 1e-5
        S = S + kept


@pytest.mark.parametrize(
    ("alpha", "q"), [(0.0, 0), (0.39, 0), (0.4, 0), (0.41, 1), (0.7, 1), (0.71, 2), (0.9, 2), (0.91, 3), (1.0, 3)]
)
def test_protected_directions_are_one_fewer_than_hold_the_share(alpha: float, q: int) -> None:
    assert protected_directions(torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64), alpha) == q


def test_at_alpha_one_all_directions_but_the_last_are_protected() -> None:
    S = with_spectrum(50, 30, power_law(20, 1.0), seed=13)
    svd = thin_svd(S)
    assert protected_directions(svd.s, 1.0) == svd.rank - 1 == 19


def test_neither_argument_is_changed() -> None:
    S, delta = randn(30, 20, seed=15, dtype=torch.float32), randn(30, 20, seed=16, dtype=torch.float32)
    before = S.clone(), delta.clone()
    for projection in PROJECTIONS:
        projected(S, delta, 0.5, projection)
    assert torch.equal(S, before[0]) and torch.equal(delta, before[1])


def test_the_same_bits_on_one_thread_and_on_four() -> None:
    pairs = [
        (randn(m, n, seed=i, dtype=torch.float32), randn(m, n, seed=i + 50, dtype=torch.float32))
        for i, (m, n) in enumerate([(300, 200), (200, 300), (257, 257), (64, 500)] * 3)
    ]

    def run(workers: Any) -> Any:
        def work(pair: tuple[Tensor, Tensor]) -> Any:
            torch.set_num_threads(1)
            return projected(*pair, 0.5, "reference")

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(work, pairs))

    before = torch.get_num_threads()
    try:
        one, four, again = run(1), run(4), run(4)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, four, again, strict=True))


def test_the_same_bits_wherever_the_state_lies_in_memory() -> None:
    S, delta = randn(200, 150, seed=17, dtype=torch.float32), randn(200, 150, seed=18, dtype=torch.float32)
    shifted = torch.empty(200 * 150 + 3)[3:].view(200, 150).copy_(S)  # as in a mapped file: 12 bytes off
    assert torch.equal(projected(S, delta, 0.5, "reference"), projected(shifted, delta, 0.5, "reference"))


def test_torch_alone_gives_the_same_where_numpy_brings_no_lapack(monkeypatch: pytest.MonkeyPatch) -> None:
    S, delta = randn(90, 70, seed=19, dtype=torch.float32), randn(90, 70, seed=20, dtype=torch.float32)
    fast = projected(S, delta, 0.5, "reference")
    monkeypatch.setattr(symmetric, "_lapack", lambda: None)
    assert relative(projected(S, delta, 0.5, "reference") - fast, fast) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_eigenvectors_come_from_the_upper_triangle(n: int, dtype: Any) -> None:
    matrix = randn(n, n, seed=21)
    matrix = matrix @ matrix.T
    values, vectors = symmetric.leading_eigenvectors(matrix.triu(), dtype=dtype)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(matrix).flip(0))
    atol = 1e-4 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(matrix @ vectors.double(), vectors.double() * values, rtol=0, atol=atol)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(n, dtype=dtype), rtol=0, atol=atol)


@pytest.mark.parametrize("lapack", [True, False])
def test_small_eigenvalues_of_a_float32_matrix_are_found_in_float64(
    lapack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`agree` sums their roots: rounding must not lift them to 1e-7 of the largest."""
    if not lapack:
        monkeypatch.setattr(symmetric, "_lapack", lambda: None)
    g = torch.arange(1, 301, dtype=torch.float64) ** -2  # eigenvalues down to 1e-10
    directions = torch.eye(300).double() + 0.01 * randn(300, 300, seed=22)
    matrix = g[:, None] * (directions @ directions.T) * g
    exact = torch.linalg.eigvalsh(matrix).flip(0)
    values, vectors = symmetric.leading_eigenvectors(matrix.float(), lambda found: 40, torch.float32)
    assert values.dtype == torch.float64
    assert vectors.shape == (300, 40)
    assert float(values.sqrt().sum()) == pytest.approx(float(exact.sqrt().sum()), rel=1e-4)
    found = vectors.double()
    torch.testing.assert_close(matrix @ found, found * values[:40], rtol=0, atol=1e-6)
