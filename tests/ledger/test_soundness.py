"""Entries that somebody has forged, with digests that fit, are named as damaged by every command that meets them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mergestream import Average, Ledger, MergestreamError, Store
from mergestream.ledger.soundness import find_fault
from mergestream.testing import make_models, make_odd_models, make_store, save_models
from mergestream.testing.models import saved_adapters
from tests.conftest import RunCommand, files
from tests.ledger.forging import forge_entry

Change = Callable[[dict[str, Tensor]], object]
NAME = "a.weight"


def put(slot: str, index: int, value: float) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{slot}:{NAME}"].view(-1)[index] = value

    return change


def unsorted(tensors: dict[str, Tensor]) -> None:
    tensors[f"sigma:{NAME}"] = tensors[f"sigma:{NAME}"].flip(0)


def scaled(tensors: dict[str, Tensor]) -> None:
    tensors[f"left:{NAME}"] *= 3


def repeated(tensors: dict[str, Tensor]) -> None:
    tensors[f"right:{NAME}"][1] = tensors[f"right:{NAME}"][0]


ENERGY: dict[str, Change] = {
    "negative": put("sigma", 2, -0.1),
    "nan": put("sigma", 0, math.nan),
    "infinite": put("sigma", 0, math.inf),
    "overflowing": put("sigma", 0, 1e200),
    "unsorted": unsorted,
    "no norm": put("norm2", 0, 0.0),
    "negative norm": put("norm2", 0, -1.0),
    "nan norm": put("norm2", 0, math.nan),
    "infinite norm": put("norm2", 0, math.inf),
}
DIRECTIONS: dict[str, Change] = {
    "nan direction": put("left", 3, math.nan),
    "infinite direction": put("right", 3, math.inf),
    "scaled directions": scaled,
}


@pytest.fixture
def forged(tmp_path: Path) -> Callable[[Change], Store]:
    paths = save_models(tmp_path, make_models(3))
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:3])

    def forge(change: Change) -> Store:
        forge_entry(store, 2, change)
        return Store(store.path)

    return forge


@pytest.mark.parametrize("kind", [*ENERGY, *DIRECTIONS])
def test_every_command_that_meets_it_names_file_and_tensor(
    forged: Callable[[Change], Store], kind: str, tmp_path: Path, mergestream: RunCommand
) -> None:
    store = forged({**ENERGY, **DIRECTIONS}[kind])
    before = files(store.path)
    commands: list[tuple[object, ...]] = [
        ("verify", store.path),
        ("export", store.path, tmp_path / "out"),
        ("diff", store.path, 1, 2),
        ("report", store.path, "--format", "json"),
        ("inspect", store.path, tmp_path / "expert3.safetensors"),
    ]
    if kind in ENERGY:
        commands += [("log", store.path)]
    for command in commands:
        result = mergestream(*command)
        assert result.code == 1 and result.out == "", (command, result)
        assert re.search(f"0002/model.safetensors is damaged: .*{NAME} (cannot be right|holds NaN or Inf)", result.err)
        assert "remove the expert and add it once more" in result.err
    assert files(store.path) == before
    assert mergestream("remove", store.path, "expert2").code == 0
    assert mergestream("add", store.path, tmp_path / "expert3.safetensors").code == 0
    Store(store.path).verify()


def test_verify_finds_directions_that_are_not_orthogonal(forged: Callable[[Change], Store]) -> None:
    store = forged(repeated)
    with pytest.raises(MergestreamError, match=r"its right directions must be orthonormal"):
        store.verify()


def test_tensors_that_are_kept_whole_must_be_finite(forged: Callable[[Change], Store], tmp_path: Path) -> None:
    store = forged(lambda tensors: tensors.update({"delta:a.bias": torch.full((40,), math.nan)}))
    for run in (store.verify, lambda: store.export(tmp_path / "out")):
        with pytest.raises(MergestreamError, match=r"is damaged: delta:a.bias holds NaN or Inf"):
            run()


@pytest.mark.parametrize("of_adapters", [False, True], ids=["dense", "in factors"])
def test_states_must_be_finite(of_adapters: bool, tmp_path: Path, mergestream: RunCommand) -> None:
    with saved_adapters() as (_, base, _, full, adapters):
        experts = adapters if of_adapters else full
        store = make_store(tmp_path / "store", Average(), base, experts[:2])
        forge_entry(store, 2, lambda tensors: next(iter(tensors.values())).view(-1)[:1].fill_(math.nan))
        for command in (
            ("verify", store.path),
            ("export", store.path, tmp_path / "out"),
            ("export", store.path, tmp_path / "out", "--format", "lora", "--rank", 2),
            ("add", store.path, experts[2]),
        ):
            result = mergestream(*command)
            assert result.code == 1 and result.out == "", (command, result)
            assert "0002/model.safetensors is damaged: sum:" in result.err and "holds NaN or Inf" in result.err
            assert not (tmp_path / "out").exists() and Store(store.path).manifest.step == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("svd", ["exact", "randomised"])
@pytest.mark.parametrize("decay", [0.0, 1.0, 4.0, 12.0])
def test_what_the_ledger_writes_is_sound(dtype: str, svd: str, decay: float, tmp_path: Path) -> None:
    """Also where singular values fall by eleven orders of magnitude, whose vectors are the least exact."""
    generator = torch.Generator().manual_seed(int(decay))
    base, expert = {}, {}
    for name, shape in {"a.weight": (200, 90), "b.weight": (60, 300), "mlp.experts.up": (3, 70, 40)}.items():
        u, _, vh = torch.linalg.svd(torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False)
        sigma = torch.logspace(0, -decay, u.shape[-1], dtype=torch.float64)
        base[name], expert[name] = torch.zeros(shape), ((u * sigma) @ vh).float()
    paths = save_models(tmp_path, [base, expert])
    store = make_store(tmp_path / "store", Ledger(budget=4, entries=dtype, svd=svd), paths[0], paths[1:])  # type: ignore[arg-type]
    store.verify()


def test_what_the_ledger_writes_of_odd_tensors_is_sound(tmp_path: Path) -> None:
    paths = save_models(tmp_path, make_odd_models())
    make_store(tmp_path / "store", Ledger(), paths[0], paths[1:]).verify()


def test_nothing_and_zero_are_sound() -> None:
    zero = torch.zeros((), dtype=torch.float64)
    assert find_fault({}) is None
    empty = {
        "left": torch.zeros(0, 5),
        "sigma": torch.zeros(0, dtype=zero.dtype),
        "right": torch.zeros(0, 4),
        "norm2": zero,
    }
    unchanged = {
        "left": torch.zeros(2, 5),
        "sigma": torch.zeros(2, dtype=zero.dtype),
        "right": torch.zeros(2, 4),
        "norm2": zero,
    }
    for slots in (empty, unchanged):
        assert find_fault(slots, thorough=True) is None


@pytest.mark.parametrize(("length", "is_sound"), [(0.995, True), (1.005, True), (0.98, False), (1.012, False)])
def test_directions_are_as_long_as_rounding_to_bfloat16_leaves_them(length: float, is_sound: bool) -> None:
    sigma = torch.ones(1, dtype=torch.float64)
    slots = {"left": torch.eye(1, 4) * length, "sigma": sigma, "right": torch.eye(1, 5), "norm2": sigma[0]}
    assert (find_fault(slots) is None) == is_sound
