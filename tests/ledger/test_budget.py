"""The budget of a ledger: adapters keep their rank while there is room, and what is cut too short is said."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mergestream import Ledger, Store
from mergestream.methods.base import Context
from mergestream.report.facts import Facts
from mergestream.testing import assert_close, assert_same, exported, make_models, make_store, save_models
from tests.handmade import handmade_adapter
from tests.ledger.forging import forge_entry
from tests.ledger.merging import ledger_of

MODULES = {"a": (40, 24), "b": (24, 40)}


def adapter(directory: Path, seed: int, rank: int, **modules: tuple[int, int]) -> Path:
    return handmade_adapter(directory / f"adapter{seed}", seed, rank, modules or MODULES)


@pytest.fixture
def models() -> Any:
    return make_models(20)


@pytest.fixture
def paths(models: Any, tmp_path: Path) -> list[Path]:
    return save_models(tmp_path, models)


def lengths(store: Store, name: str = "a.weight") -> list[tuple[int, int]]:
    """The directions and the singular values in every entry."""
    with store.snapshot() as snapshot:
        shapes = [reader.shapes(name) for reader in snapshot.readers.values()]
    return [(shape["left"][-2], shape["sigma"][-1]) for shape in shapes]


def context(r: int, rank: int | None = None) -> Context:
    return Context(1, True, (r, 2 * r), rank=rank)


@pytest.mark.parametrize("budget", [0.25, 0.7, 1.0, 1.1, 3.3, 8.0])
def test_full_fine_tunes_share_the_budget_as_they_always_did(budget: float) -> None:
    method = Ledger(budget=budget)
    for r in range(33, 300, 7):
        for t in range(1, 50):
            wanted = method.wanted_rank(context(r))
            kept = min(wanted, method.kept_rank(context(r), [wanted] * t))
            assert kept == min(r, max(1, math.floor(budget * r / max(t, 8)))), (r, t)


def test_the_level_is_the_largest_that_fits() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        r = int(torch.randint(8, 100, (), generator=generator))
        count = int(torch.randint(1, 12, (), generator=generator))
        wanted_ranks = torch.randint(0, r + 1, (count,), generator=generator).tolist()
        level = Ledger().kept_rank(context(r), wanted_ranks)
        fits = [k for k in range(r + 1) if sum(min(wanted, k) for wanted in wanted_ranks) <= r]
        assert min(level, r) == max(1, min(max(fits), max(wanted_ranks))), (r, wanted_ranks)
        assert Ledger().kept_rank(context(r), [*wanted_ranks, 5]) <= max(level, 5)


def test_adapters_are_kept_whole_while_there_is_room(tmp_path: Path, paths: list[Path]) -> None:
    """The first adapter used to be cut to an eighth of the directions."""
    store = make_store(tmp_path / "store", Ledger(entries="float32"), paths[0])
    for seed, rank in enumerate((12, 8, 4)):
        path = adapter(tmp_path, seed, rank)
        store.add(path)
        assert lengths(store)[-1] == (rank, rank)
    with store.snapshot() as snapshot:
        reading = snapshot.reading(store.engine)
        assert reading.least_held == pytest.approx(1, abs=1e-9) and snapshot.shortfall() is None
    single = make_store(tmp_path / "single", Ledger(budget=8, entries="float32"), paths[0], [path])
    assert_close(
        exported(store, readout="expert:adapter2"),
        exported(single, readout="expert:adapter2"),
        make_models(0)[0],
        1e-6,
        "back",
    )


def test_a_low_rank_change_of_a_convolution_is_kept(tmp_path: Path, paths: list[Path]) -> None:
    generator = torch.Generator().manual_seed(0)
    directory = handmade_adapter(tmp_path / "conv", 0, 4, {})
    A, B = torch.randn(4, 3, 3, 3, generator=generator), torch.randn(8, 4, 1, 1, generator=generator)
    factors = {"base_model.model.conv.lora_A.weight": A, "base_model.model.conv.lora_B.weight": B}
    save_file(factors, directory / "adapter_model.safetensors")
    store = make_store(tmp_path / "store", Ledger(entries="float32"), paths[0], [directory])
    assert lengths(store, "conv.weight") == [(4, 4)]
    moved = exported(store, readout="expert:conv")["conv.weight"] - load_file(paths[0])["conv.weight"]
    torch.testing.assert_close(moved, 2 * (B.flatten(1) @ A.flatten(1)).reshape(8, 3, 3, 3), rtol=1e-4, atol=1e-4)


def test_only_the_adapters_that_change_a_tensor_share_its_budget(tmp_path: Path, paths: list[Path]) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0])
    for seed in range(6):
        store.add(adapter(tmp_path, seed, 10, **{"a" if seed < 2 else "b": MODULES["a" if seed < 2 else "b"]}))
    with store.snapshot() as snapshot:
        directions = snapshot.reading(store.engine).directions  # type: ignore[attr-defined]
    assert directions["a.weight"] >= 10 and directions["b.weight"] == 6


def test_any_order_of_adapters_and_full_fine_tunes_gives_the_same_bits(tmp_path: Path, paths: list[Path]) -> None:
    experts = [adapter(tmp_path, 1, 24), adapter(tmp_path, 2, 2), adapter(tmp_path, 3, 9), *paths[1:3]]
    merged = []
    for number, order in enumerate(list(itertools.permutations(range(5)))[::23]):
        store = make_store(tmp_path / f"{number}", Ledger(), paths[0], [experts[i] for i in order])
        merged.append(exported(store, readout="tsv"))
    with store.snapshot() as snapshot:  # 3 + 3 + 2 of 24 leave 16 to two that ask for 24 and 9
        assert snapshot.reading(store.engine).directions["a.weight"] == 8  # type: ignore[attr-defined]
    for other in merged[1:]:
        assert_same(other, merged[0], "in another order")


def test_entries_of_adapters_stay_within_twice_the_budget(tmp_path: Path, paths: list[Path]) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0])
    for seed in range(12):
        store.add(adapter(tmp_path, seed, 24))
        assert sum(kept for kept, _ in lengths(store)) <= 2 * 24
    store.verify()
    assert {asked for _, asked in lengths(store)} == {24}, "what they ask for is remembered"
    assert min(kept for kept, _ in lengths(store)) == 2


def as_before(tensors: dict[str, Tensor]) -> None:
    """Singular values were cut like the directions."""
    for name in list(tensors):
        if name.startswith("sigma:"):
            tensors[name] = tensors[name][: len(tensors[name.replace("sigma", "left")])]


def test_a_store_whose_entries_are_cut_already_opens_and_goes_on(
    tmp_path: Path, models: Any, paths: list[Path]
) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:12])
    before = exported(store)
    for number in range(1, 12):
        forge_entry(store, number, as_before)
    store = Store(store.path)
    store.verify()
    assert_same(exported(store), before, "read as before")
    for path in paths[12:18]:
        store.add(path)
    assert_same(exported(store), ledger_of(models, range(1, 18)).state_dict(), "continued")
    forge_entry(store, 17, lambda tensors: tensors.update({"sigma:a.weight": torch.ones(30, dtype=torch.float64)}))
    with pytest.raises(Exception, match="not as ledger lays it out"):
        exported(Store(store.path))


def test_an_adapter_that_was_cut_already_opens_and_goes_on(tmp_path: Path, paths: list[Path]) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], [adapter(tmp_path, 1, 6), adapter(tmp_path, 2, 6)])

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: x[:3] for name, x in tensors.items() if x.ndim and not name.startswith("delta")})

    forge_entry(store, 1, cut)
    store = Store(store.path)
    store.add(adapter(tmp_path, 3, 6))
    assert lengths(store) == [(3, 3), (6, 6), (6, 6)]
    exported(store)
    with store.snapshot() as snapshot:
        assert "adapter1" in (snapshot.shortfall() or "") and "adapter2" not in (snapshot.shortfall() or "")


def test_what_is_cut_too_short_is_said_everywhere(tmp_path: Path, paths: list[Path], done: Callable[..., str]) -> None:
    place = tmp_path / "store"
    done("init", place, "--base", paths[0], "--method", "ledger")
    adapters = [adapter(tmp_path, seed, 12) for seed in (1, 3, 5)]
    for path in adapters[:2]:
        (added,) = json.loads(done("add", place, path, "--json"))
        assert not [note for note in added["notes"] if "budget" in note]
    assert "merged by ledger" in done("export", place, tmp_path / "all", "--format", "lora")

    def notes(*words: object) -> str:
        answer = json.loads(done(*words, "--json"))
        (note,) = (note for note in (answer[0] if isinstance(answer, list) else answer)["notes"] if "budget" in note)
        return str(note)

    expected = "avoids that"
    note = notes("inspect", place, adapters[2])
    assert note == notes("add", place, adapters[2]) == notes("status", place)
    assert "adapter1 (" in note and "adapter5 (" in note and note.endswith(f"with --set budget=1.5 {expected}")
    assert any(expected in finding for finding in Facts.of(Store(place)).findings())
    assert notes("export", place, tmp_path / "merged") == note
    assert "adapter5" in notes("export", place, tmp_path / "one", "--format", "lora", "--readout", "expert:adapter5")
    done("init", tmp_path / "larger", "--base", paths[0], "--method", "ledger", "--set", "budget=1.5")
    for path in adapters:
        (added,) = json.loads(done("add", tmp_path / "larger", path, "--json"))
        assert not [note for note in added["notes"] if "budget" in note] and added["held"] > 0.9999


def test_exactly_is_said_only_of_entries_that_hold_all(
    tmp_path: Path, paths: list[Path], done: Callable[..., str]
) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], [adapter(tmp_path, 1, 9), paths[1]])
    lora = ("--format", "lora", "--overwrite")
    printed = done("export", store.path, tmp_path / "out", *lora, "--readout", "expert:adapter1")
    assert printed.endswith(", in full rank, rounded to bfloat16\n")
    printed = done("export", store.path, tmp_path / "out", *lora, "--readout", "expert:expert1", "--rank", 40)
    assert not printed.endswith(", exactly\n") and "of entries that hold" in printed


def test_only_what_is_cut_of_adapters_is_noted(tmp_path: Path, paths: list[Path]) -> None:
    """Full fine-tunes are always cut: `add` prints the share, and the report has a finding where it is below half."""
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:4])
    with store.snapshot() as snapshot:
        assert snapshot.reading(store.engine).least_held < 0.7 and snapshot.shortfall() is None
