"""A small store with everything that a report can show."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from mergestream import OPCM, Ledger, Store
from mergestream.engine.local import single_threaded
from tests.conftest import StateDict, save_model

EXPERTS = ("cars", "digits", "pets")
SCORES = [[0.9, 0.3, 0.4], [0.8, 0.95, 0.5], [0.7, 0.85, 0.8]]


def model(seed: int = 0) -> StateDict:
    """Three layers whose names sort wrongly as text, an embedding and a pooler."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    tensors = {"embeddings.weight": normal(50, 16), "pooler.weight": normal(16, 16), "pooler.bias": normal(16)}
    for layer in (1, 2, 10):
        tensors[f"encoder.layer.{layer}.up.weight"] = normal(32, 16)
        tensors[f"encoder.layer.{layer}.down.weight"] = normal(16, 32)
        tensors[f"encoder.layer.{layer}.norm.bias"] = normal(16)
    return tensors


def expert(base: StateDict, seed: int, shared: float = 0.3, size: float = 0.01) -> StateDict:
    """A perturbed copy; all experts have some of the perturbation in common."""
    common, own = torch.Generator().manual_seed(1234), torch.Generator().manual_seed(seed)
    return {
        name: tensor
        + size
        * (
            shared * torch.randn(tensor.shape, generator=common)
            + (1 - shared) * torch.randn(tensor.shape, generator=own)
        )
        for name, tensor in base.items()
    }


def known(values: Iterable[float | None]) -> list[float]:
    """The values, none of which may be missing."""
    found = []
    for value in values:
        assert value is not None
        found.append(value)
    return found


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``base`` and the experts; never write to it."""
    place = tmp_path_factory.mktemp("models")
    base = model()
    save_model(place / "base", base)
    for seed, name in enumerate(EXPERTS, 1):
        save_model(place / name, expert(base, seed))
    save_model(place / "giant", expert(base, 7, shared=0.0, size=0.06))
    return place


def make_store(path: Path, models: Path, experts: tuple[str, ...] = EXPERTS, **options: Any) -> Store:
    with single_threaded():
        store = Store.create(path, models / "base", OPCM(alpha=0.5), **options)
        for name in experts:
            store.add(models / name)
    return store


def make_ledger(path: Path, models: Path, experts: tuple[str, ...] = EXPERTS, **parameters: Any) -> Store:
    with single_threaded():
        ledger = Store.create(path, models / "base", Ledger(**parameters))
        for name in experts:
            ledger.add(models / name)
    return ledger


@pytest.fixture(scope="session")
def ledger(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Store:
    """Three experts in a ledger that holds nearly all of them; shared by all tests: never write to it."""
    return make_ledger(tmp_path_factory.mktemp("ledgers") / "ledger", models, budget=8.0, entries="float32")


@pytest.fixture(scope="session")
def scored(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Store:
    """Three experts and their scores; shared by all tests: never write to it."""
    store = make_store(tmp_path_factory.mktemp("stores") / "scored", models, keep=2)
    store.attach_scores(EXPERTS, SCORES, base=[0.2, 0.3, 0.4], experts=[0.95, 0.97, 0.9])
    return store


@pytest.fixture
def store(tmp_path: Path, models: Path) -> Store:
    """Two experts, in a place of its own."""
    return make_store(tmp_path / "store", models, EXPERTS[:2], keep=1)
