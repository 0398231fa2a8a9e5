"""The truncated second moment, against its formula with dense matrices."""

import pytest
import torch
from torch import Tensor

from mergestream.ledger.moment import Moment


def matrix(n: int = 12, tokens: int = 40) -> Tensor:
    x = torch.randn(tokens, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x *= torch.logspace(0, -2, n, dtype=torch.float64)
    return x.T @ x / tokens


def dense(values: Tensor, vectors: Tensor, rest: float) -> Tensor:
    """The formula as it is written down."""
    k, n = vectors.shape
    inside = vectors.T @ vectors
    outside = rest / (n - k) * (torch.eye(n, dtype=torch.float64) - inside) if k < n else 0
    return vectors.T @ torch.diag(values) @ vectors + outside


@pytest.mark.parametrize("count", [0, 1, 5, 12])
def test_it_is_the_formula_of_the_leading_eigenpairs(count: int) -> None:
    G = matrix()
    values, vectors = torch.linalg.eigh(G)
    values, vectors = values.flip(0), vectors.flip(1)
    expected = dense(values[:count], vectors[:, :count].T, float(values[count:].sum()))
    moment = Moment.of(G, count)
    rows = torch.randn(3, 12)
    assert moment.apply(rows).dtype == torch.float64
    torch.testing.assert_close(moment.apply(rows), rows.double() @ expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(moment.trace, float(G.trace()))


def test_with_all_directions_it_is_the_matrix_itself() -> None:
    G = matrix()
    moment = Moment.of(G, 12)
    assert moment.rest == 0
    torch.testing.assert_close(moment.apply(torch.eye(12)), G, rtol=1e-10, atol=1e-14)


def test_a_cut_of_a_cut_equals_the_cut() -> None:
    twice, once = Moment.of(matrix(), 8).cut(3), Moment.of(matrix(), 3)
    torch.testing.assert_close(twice.values, once.values)
    torch.testing.assert_close(twice.rest, once.rest)
    torch.testing.assert_close(twice.apply(torch.eye(12)), once.apply(torch.eye(12)))
    assert once.cut(5) is once


def test_it_has_no_more_directions_than_the_rank() -> None:
    x = torch.randn(2, 6, dtype=torch.float64)
    moment = Moment.of(x.T @ x, 4)
    assert moment.vectors.shape == (2, 6)
    assert moment.rest < 1e-12
    assert Moment.of(torch.zeros(6, 6), 4).vectors.shape == (0, 6)


def test_stored_vectors_are_applied_as_they_are_rounded() -> None:
    moment = Moment.of(matrix(), 5, torch.bfloat16)
    assert moment.vectors.dtype == torch.bfloat16
    expected = dense(moment.values, moment.vectors.double(), moment.rest)
    torch.testing.assert_close(moment.apply(torch.eye(12)), expected)
