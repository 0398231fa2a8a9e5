"""Inputs of a store, in the models that are read out of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from mergestream import Store
from mergestream.engine import LocalEngine
from mergestream.progress import NoProgress
from mergestream.testing import assert_same
from tests.inputs import conftest as families
from tests.inputs.conftest import TEXTS, expert_of, save_with_companions


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_with_companions(families.bert(), tmp_path / "base")


@pytest.fixture
def experts(tmp_path: Path, base: Path) -> list[Path]:
    return [expert_of(base, tmp_path / name, seed) for seed, name in enumerate(("one", "two", "three"), 2)]


def made(place: Path, base: Path, experts: list[Path], inputs: int = 0, workers: int = 1) -> Store:
    """A store of the experts, of which so many have inputs."""
    store = Store.create(place, base, progress=NoProgress(), engine=LocalEngine(workers))
    for number, expert in enumerate(experts):
        store.add(expert, inputs=TEXTS[number:] if number < inputs else None)
    return store


def exported(store: Store, readout: str) -> dict[str, Tensor]:
    out = store.path.with_name(f"{store.path.name}-{readout}")
    return load_file(store.export(out, readout=readout, overwrite=True) / "model.safetensors")


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not (one[name] == other[name]).all() for name in one)


def test_inputs_change_what_regress_gives_and_nothing_else(tmp_path: Path, base: Path, experts: list[Path]) -> None:
    store = made(tmp_path / "store", base, experts)
    agree, before = exported(store, "agree"), exported(store, "regress")
    store.calibrate("two", TEXTS)
    assert_same(exported(store, "agree"), agree, "agree, calibrated")
    assert differ(exported(store, "regress"), before)
    store.undo()
    assert_same(exported(store, "regress"), before, "calibrated and taken back")


@pytest.mark.parametrize("inputs", [1, 3])
def test_neither_order_nor_workers_change_a_bit(tmp_path: Path, base: Path, experts: list[Path], inputs: int) -> None:
    merged = exported(made(tmp_path / "store", base, experts, inputs), "regress")
    other = Store.create(tmp_path / "other", base, progress=NoProgress(), engine=LocalEngine(3))
    for expert in reversed(experts):
        other.add(expert)
    for number in range(inputs):
        other.calibrate(experts[number].name, TEXTS[number:])
    assert_same(exported(other, "regress"), merged, "in another order")
    other.remove(experts[0].name)
    never = made(tmp_path / "never", base, experts[1:])
    for number in range(1, inputs):
        never.calibrate(experts[number].name, TEXTS[number:])
    assert_same(exported(other, "regress"), exported(never, "regress"), "without the first")


def test_damage_is_predicted_on_the_inputs(tmp_path: Path, base: Path, experts: list[Path]) -> None:
    store = made(tmp_path / "store", base, experts)
    before = store.damage()
    store.calibrate("two", TEXTS)
    after = store.damage()
    assert after["two"] != pytest.approx(before["two"], rel=1e-3)
    assert after["one"] == pytest.approx(before["one"], rel=1e-9)
