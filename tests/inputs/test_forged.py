"""Statistics of inputs that somebody has forged, with digests that fit, are named as damaged where they are read."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mergestream import Inputs, Ledger, LocalEngine, Store
from mergestream.progress import NoProgress
from tests.conftest import RunCommand, files, save_model
from tests.ledger.forging import forge_inputs

Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


def put(name: str, value: float) -> Change:
    return lambda tensors, index: tensors[name].view(-1)[:1].fill_(value)


def replace(name: str, tensor: Tensor) -> Change:
    return lambda tensors, index: tensors.update({name: tensor})


USED: dict[str, Change] = {
    "nan": put("values:0.weight", math.nan),
    "infinite": put("vectors:0.weight", math.inf),
    "negative": put("values:0.weight", -1.0),
    "overflowing": put("values:0.weight", 1e200),
    "unsorted": lambda tensors, index: tensors.update({"values:0.weight": tensors["values:0.weight"].flip(0)}),
    "scaled": lambda tensors, index: tensors["vectors:0.weight"].mul_(1000),
    "negative rest": put("rest:0.weight", -1.0),
    "infinite rest": put("rest:0.weight", math.inf),
    "several rests": replace("rest:0.weight", torch.zeros(3, dtype=torch.float64)),
    "integers": replace("vectors:0.weight", torch.ones(16, 16, dtype=torch.int64)),
    "a vector": replace("vectors:0.weight", torch.ones(16)),
    "more values": replace("values:0.weight", torch.zeros(20, dtype=torch.float64)),
    "other width": replace("vectors:0.weight", torch.zeros(16, 99)),
    "of another layer": lambda tensors, index: index["shared"].update({"0.weight": "2.weight"}),
    "of no layer": lambda tensors, index: index["shared"].update({"x.weight": "0.weight"}),
    "missing": lambda tensors, index: index["shared"].update({"0.weight": "nobody"}),
    "unknown": replace("more", torch.ones(1)),
}
"""What a readout by inputs meets, and reports too"""
UNUSED: dict[str, Change] = {
    "nan mean": put("mean", math.nan),
    "other mean": replace("mean", torch.zeros(3, dtype=torch.float64)),
    "negative feature": put("values:features", -1.0),
    "not orthogonal": lambda tensors, index: tensors["vectors:features"][1].copy_(tensors["vectors:features"][0]),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a ledger of two experts that both were run on inputs, and a third expert."""
    place = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
    given = Inputs([torch.randn(5, 16) for _ in range(20)], model=model)
    for name in ("base", "one", "two", "three"):
        save_model(place / name, model.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    store = Store.create(place / "store", place / "base", Ledger(budget=8), engine=LocalEngine(1))
    for name in ("one", "two"):
        store.add(place / name, inputs=given)
    return place


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Store:
    return Store(shutil.copytree(made / "store", tmp_path / "store"), progress=NoProgress())


@pytest.mark.parametrize("kind", [*USED, *UNUSED])
def test_every_command_that_meets_them_says_what_to_do(
    store: Store, kind: str, made: Path, tmp_path: Path, mergestream: RunCommand
) -> None:
    forge_inputs(store, 2, {**USED, **UNUSED}[kind])
    before = files(store.path)
    commands: list[tuple[object, ...]] = [("verify", store.path)]
    if kind in USED:
        commands += [
            ("export", store.path, tmp_path / "out", "--readout", "regress"),
            ("report", store.path, "--format", "json"),
            ("inspect", store.path, made / "three"),
        ]
    for command in commands:
        result = mergestream(*command)
        assert result.code == 1 and result.out == "", (command, result)
        assert "inputs/0002" in result.err and "measure them again with mergestream calibrate" in result.err, command
    assert files(store.path) == before


def test_they_can_be_measured_again(store: Store, tmp_path: Path) -> None:
    forge_inputs(store, 2, USED["negative"])
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
    store.calibrate("two", Inputs([torch.randn(5, 16) for _ in range(20)], model=model))
    store.verify()
    store.export(tmp_path / "out", readout="regress")
