"""The router, against the formula of a linear discriminant with dense matrices."""

import pytest
import torch
from torch import Tensor

from mergestream.ledger.routing import FeatureStatistics, Router


def features(seed: int, centre: float, count: int = 40, size: int = 6) -> Tensor:
    torch.manual_seed(seed)
    return centre * torch.randn(size) + torch.randn(count, size) @ torch.randn(size, size)


def expected_scores(groups: dict[str, Tensor], x: Tensor) -> Tensor:
    """ln N(x; μ_i, Σ) up to a constant, one column per expert in the order of their names."""
    centred = torch.cat([rows.double() - rows.double().mean(0) for rows in groups.values()])
    covariance = centred.T @ centred / (len(centred) - len(groups))
    covariance = 0.9 * covariance + 0.1 * covariance.trace() / len(covariance) * torch.eye(len(covariance))
    columns = []
    for name in sorted(groups):
        off = x.double() - groups[name].double().mean(0)
        columns.append(-0.5 * torch.einsum("bi,ij,bj->b", off, torch.linalg.inv(covariance), off))
    return torch.stack(columns, 1)


def test_it_is_a_linear_discriminant() -> None:
    groups = {"b": features(1, 3, 40), "a": features(2, 1, 25), "c": features(3, 5, 60)}
    router = Router.of({name: FeatureStatistics.of(rows, 6) for name, rows in groups.items()})
    assert router.experts == ("a", "b", "c")
    x = torch.cat(list(groups.values()))
    scores, expected = router.scores(x), expected_scores(groups, x)
    posterior = expected.softmax(1)
    torch.testing.assert_close(scores.softmax(1), posterior, rtol=1e-4, atol=1e-5)
    best, confidence = router.route(x)
    torch.testing.assert_close(confidence, posterior.max(1).values, rtol=1e-4, atol=1e-5)
    assert (best == posterior.argmax(1)).all()


def test_few_directions_are_enough() -> None:
    """What is cut off is spread over all directions."""
    groups = {name: features(seed, 5, size=30) for seed, name in enumerate("ab")}
    cut = Router.of({name: FeatureStatistics.of(rows, 4) for name, rows in groups.items()})
    x = torch.cat(list(groups.values()))
    assert (cut.route(x)[0] == torch.tensor([0] * 40 + [1] * 40)).double().mean() > 0.95


def test_extremes() -> None:
    same = FeatureStatistics.of(torch.ones(3, 4), 4)
    router = Router.of({"a": same, "b": same})
    _, confidence = router.route(torch.zeros(1, 4))
    assert float(confidence) == pytest.approx(0.5)
    assert float(Router.of({"a": same}).route(torch.zeros(1, 4))[1]) == 1
