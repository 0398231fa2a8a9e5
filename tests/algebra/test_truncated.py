"""The leading singular triplets: the exact ones against LAPACK's, the randomised ones by the energy they capture."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from mergestream.algebra import truncated
from mergestream.algebra.truncated import truncated_svd
from mergestream.engine import single_threaded
from tests.algebra.test_svd import power_law, randn, with_spectrum

METHODS: list[truncated.Method] = ["exact", "randomised"]
SHAPES = [(96, 96), (160, 64), (64, 160), (1, 40), (40, 1), (1, 1), (2, 3)]
SPECTRA = {
    "Gaussian": lambda m, n: randn(m, n, seed=1, dtype=torch.float32),
    "j^-0.3": lambda m, n: with_spectrum(m, n, power_law(min(m, n), 0.3), seed=2),
    "j^-0.7": lambda m, n: with_spectrum(m, n, power_law(min(m, n), 0.7), seed=3),
    "j^-1": lambda m, n: with_spectrum(m, n, power_law(min(m, n), 1.0), seed=4),
    "j^-2": lambda m, n: with_spectrum(m, n, power_law(min(m, n), 2.0), seed=5),
    "all equal": lambda m, n: with_spectrum(m, n, torch.ones(min(m, n), dtype=torch.float64), seed=6),
    "two levels": lambda m, n: with_spectrum(m, n, 0.3 ** (torch.arange(min(m, n)) >= min(m, n) // 16), seed=7),
    "low rank and noise": lambda m, n: (
        with_spectrum(m, n, power_law(min(m, n) // 16, 0.5), seed=8)
        + randn(m, n, seed=9, dtype=torch.float32) / (4 * min(m, n) ** 0.5)
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    with single_threaded():
        yield


def energy(s: Any) -> Any:
    return float(s.double().square().sum())


def assert_orthonormal(svd: Any, atol: Any) -> None:
    for vectors in (svd.u, svd.v):
        gram = vectors.double().T @ vectors.double()
        torch.testing.assert_close(gram, torch.eye(svd.rank, dtype=torch.float64), rtol=0, atol=atol)


def same_bits(a: Any, b: Any) -> Any:
    return torch.equal(a.u, b.u) and torch.equal(a.s, b.s) and torch.equal(a.v, b.v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [0, 1, 5, 1000])
def test_exact_triplets_are_lapacks(shape: Any, rank: int, dtype: Any) -> None:
    S = randn(*shape, seed=10, dtype=dtype)
    u, s, vh = torch.linalg.svd(S.double(), full_matrices=False)
    k = min(rank, *shape)
    svd = truncated_svd(S, rank, "exact")
    assert svd.u.shape == (shape[0], k) and svd.v.shape == (shape[1], k)
    assert svd.u.dtype == svd.v.dtype == dtype and svd.s.dtype == torch.float64
    torch.testing.assert_close(svd.s, s[:k], rtol=1e-6, atol=0)
    product, expected = (svd.u.double() * svd.s) @ svd.v.double().T, (u[:, :k] * s[:k]) @ vh[:k]
    torch.testing.assert_close(product, expected, rtol=0, atol=1e-5 * float(s[0]))
    assert_orthonormal(svd, 1e-4 if k > 5 else 1e-5)


@pytest.mark.parametrize("shape", [(384, 384), (1536, 384), (384, 768)])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_randomised_triplets_hold_the_energy_of_the_exact_ones(spectrum: Any, shape: Any) -> None:
    S = SPECTRA[spectrum](*shape)
    svd = truncated_svd(S, 48, "randomised")
    exact = torch.linalg.svdvals(S.double())[:48]
    assert svd.rank == 48 and svd.u.shape == (shape[0], 48) and svd.v.shape == (shape[1], 48)
    assert 1 - 1e-3 < energy(svd.s) / energy(exact) < 1 + 1e-6
    held = (svd.u.double().T @ S.double() @ svd.v.double()).diagonal()
    torch.testing.assert_close(held, svd.s, rtol=1e-5, atol=1e-6 * float(svd.s[0]))
    assert bool((svd.s.diff() <= 0).all())
    assert_orthonormal(svd, 1e-5)


@pytest.mark.parametrize("rank", [1, 8, 200, 300, 377])
def test_any_rank_can_be_had_at_random(rank: int) -> None:
    S = SPECTRA["j^-0.7"](400, 384)
    svd = truncated_svd(S, rank, "randomised")
    assert svd.rank == rank
    assert energy(svd.s) > (1 - 1e-3) * energy(torch.linalg.svdvals(S.double())[:rank])
    assert_orthonormal(svd, 1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rank", [1, 5, 12])
@pytest.mark.parametrize("shape", [(200, 200), (300, 100), (100, 300)])
def test_a_matrix_of_low_rank_comes_back_whole_and_no_column_more(
    shape: tuple[int, int], rank: int, method: Any
) -> None:
    S = with_spectrum(*shape, power_law(rank, 2.5), seed=11)
    svd = truncated_svd(S, 16, method)
    assert svd.rank == rank
    product = (svd.u.double() * svd.s) @ svd.v.double().T
    assert float((product - S.double()).norm() / S.double().norm()) < 2e-6
    assert_orthonormal(svd, 1e-5 if method == "randomised" else 1e-3)


@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_matrix_has_no_triplets(dtype: Any, method: Any) -> None:
    svd = truncated_svd(torch.zeros(400, 390, dtype=dtype), 40, method)
    assert svd.u.shape == (400, 0) and svd.s.shape == (0,) and svd.v.shape == (390, 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, scale) for scale in (1e-38, 1e-30, 1e30, 1e37)] + [(torch.float64, s) for s in (1e-300, 1e300)],
)
def test_neither_tiny_nor_huge_entries_are_lost(dtype: Any, scale: Any, method: Any) -> None:
    S = SPECTRA["j^-0.7"](120, 100).to(dtype)
    svd, usual = truncated_svd(S * scale, 10, method), truncated_svd(S, 10, method)
    torch.testing.assert_close(svd.s / scale, usual.s, rtol=1e-5, atol=0)
    assert_orthonormal(svd, 1e-5)


def test_scaling_by_a_power_of_two_changes_no_bit_of_the_vectors() -> None:
    S = SPECTRA["j^-0.7"](120, 100)
    svd, usual = truncated_svd(S * 2.0**70, 10, "randomised"), truncated_svd(S, 10, "randomised")
    assert torch.equal(svd.u, usual.u) and torch.equal(svd.s, usual.s * 2.0**70) and torch.equal(svd.v, usual.v)


def test_denormal_entries_are_decomposed_too() -> None:
    S = torch.full((40, 30), 1e-45)
    for method in METHODS:
        svd = truncated_svd(S, 4, method)
        torch.testing.assert_close(svd.s, torch.linalg.svdvals(S.double())[:1], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("shape", "rank"), [((384, 400), 48), ((383, 400), 48), ((384, 400), 96)])
def test_auto_is_random_for_few_directions_of_a_large_matrix(shape: Any, rank: int) -> None:
    S = SPECTRA["j^-0.7"](*shape)
    chosen: truncated.Method = "randomised" if (min(shape), rank) == (384, 48) else "exact"
    assert same_bits(truncated_svd(S, rank), truncated_svd(S, rank, chosen))


@pytest.mark.parametrize("shape", [(400, 384), (384, 400), (90, 70), (40, 17)])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_bits_wherever_and_however_the_matrix_lies_in_memory(method: Any, shape: Any) -> None:
    S = SPECTRA["j^-0.7"](*shape)
    expected = truncated_svd(S, 7, method)
    for offset in (1, 5):
        elsewhere = torch.empty(S.numel() + 16)[offset : offset + S.numel()].view(shape).copy_(S)
        assert same_bits(truncated_svd(elsewhere, 7, method), expected)
    assert same_bits(truncated_svd(S.T.contiguous().T, 7, method), expected)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_bits_on_one_worker_and_on_four(method: Any) -> None:
    matrices = [
        SPECTRA[name](*shape) for name in ("Gaussian", "j^-0.7") for shape in [(200, 150), (150, 200), (99, 300)]
    ]

    def run(workers: Any) -> Any:
        def work(matrix: Any) -> Any:
            torch.set_num_threads(1)
            return truncated_svd(matrix, 15, method)

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(work, matrices * 2))

    torch.manual_seed(1)
    one = run(1)
    torch.manual_seed(2)  # the start is random, but always the same
    assert all(same_bits(a, b) for a, b in zip(one, run(4), strict=True))


def test_the_matrix_is_not_changed() -> None:
    for method in METHODS:
        S = SPECTRA["Gaussian"](100, 90)
        before = S.clone()
        truncated_svd(S, 9, method)
        assert torch.equal(S, before)


def test_with_the_gram_matrix_or_without_the_energy_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    S = SPECTRA["j^-0.7"](384, 384)
    with_gram = truncated_svd(S, 48, "randomised")
    monkeypatch.setattr(truncated, "USUAL_PRODUCTS", 1)
    monkeypatch.setattr(truncated, "gram", None)
    without = truncated_svd(S, 48, "randomised")
    assert energy(without.s) == pytest.approx(energy(with_gram.s), rel=1e-4)


@settings(max_examples=150)
@given(
    matrix=arrays(
        np.float32,
        array_shapes(min_dims=2, max_dims=2, max_side=24),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    rank=st.integers(0, 30),
    method=st.sampled_from(METHODS),
)
def test_no_matrix_is_refused(matrix: Any, rank: Any, method: Any) -> None:
    S = torch.from_numpy(matrix)
    svd = truncated_svd(S, rank, method)
    exact = torch.linalg.svdvals(S.double())[:rank]
    assert svd.rank <= min(rank, *S.shape) and svd.u.shape == (S.shape[0], svd.rank)
    assert all(bool(part.isfinite().all()) for part in (svd.u, svd.s, svd.v))
    scale = float(exact[0]) if rank and exact[0] else 1.0  # squares of the largest entries would overflow
    assert energy(svd.s / scale) == pytest.approx(energy(exact / scale), rel=1e-3)
