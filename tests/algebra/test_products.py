"""Products by oneDNN and by half: they are the products of float64, to the rounding of their type."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from mergestream.algebra import products
from mergestream.algebra.products import gram, multiply
from mergestream.engine import single_threaded

SHAPES = [(300, 257, 301), (1000, 64, 300), (5, 0, 4), (0, 5, 4), (3, 4, 0), (1, 1, 1), (2, 3, 4)]


def factors(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + k + n)
    return torch.randn(m, k, generator=generator, dtype=dtype), torch.randn(k, n, generator=generator, dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_product(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    a, b = factors(*shape, dtype)
    expected = a.double() @ b.double()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for left in (a, a.T.contiguous().T):
        for right in (b, b.T.contiguous().T):
            found = multiply(left, right)
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * max(1, shape[1]) ** 0.5)


def test_large_products_take_onednn_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(rows: Tensor, right: Tensor) -> Tensor:
        calls.append(len(rows))
        return torch.nn.functional.linear(rows, right)

    monkeypatch.setattr(products, "linear", counted)
    monkeypatch.setattr(products, "_SLAB", 400 * 300)
    a, b = factors(1000, 64, 300)
    multiply(a, b)
    assert calls == [400, 400, 200]
    multiply(a[:100], b)
    assert len(calls) == 3  # too small to be worth it


def test_without_onednn_it_is_torchs_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    a, b = factors(300, 257, 301)
    assert torch.equal(multiply(a, b), a @ b)


def test_workers_and_addresses_change_no_bit() -> None:
    a, b = factors(300, 257, 301)
    moved = torch.empty(a.numel() + 3)[3:].view(a.shape).copy_(a)
    with single_threaded(), ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        expected = multiply(a, b)
        for found in pool.map(multiply, [a, moved] * 4, [b] * 8):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gram_matrix_is_symmetric(dtype: torch.dtype) -> None:
    a, _ = factors(300, 40, 1)
    found = gram(a, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, found.T)
    torch.testing.assert_close(found.double(), a.double().T @ a.double(), rtol=1e-5, atol=1e-4)
