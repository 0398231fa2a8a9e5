"""Adapters in a ledger: exact entries out of their factors, and experts as adapters again."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch

from mergestream import Ledger, Store
from mergestream.algebra.lowrank import LowRank
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError, UsageError
from tests.experts.adapters.test_store import assert_same_model, store_of
from tests.workshop import Workshop, gpt2, llama

EXACT = Ledger(budget=8, entries="float32")


@pytest.fixture
def llamas(workshop: Workshop) -> tuple[Path, list[Path]]:
    base = workshop.base(llama)
    return base, [
        workshop.adapter(base, f"a{seed}", seed=seed, r=2 + seed, target_modules="all-linear") for seed in range(3)
    ]


def densifying() -> Any:
    return patch.object(LowRank, "dense", side_effect=AssertionError("an adapter was multiplied out"))


@pytest.mark.parametrize("readout", ["agree", "outputs", "tsv", "tempered", "iso", "sum"])
@pytest.mark.parametrize("model", [llama, gpt2])
def test_adapters_are_merged_as_their_dense_forms_and_never_multiplied_out(
    tmp_path: Path, workshop: Any, model: Any, readout: str
) -> None:
    base = workshop.base(model)
    adapters = [workshop.adapter(base, f"a{s}", seed=s, r=1 + s, target_modules="all-linear") for s in range(3)]
    merged = [workshop.merged(base, adapter, f"m{s}") for s, adapter in enumerate(adapters)]
    with densifying():
        ours = store_of(tmp_path / "ours", base, adapters, EXACT)
    dense = store_of(tmp_path / "dense", base, merged, EXACT)
    assert_same_model(
        ours.export(tmp_path / "a", readout=readout), dense.export(tmp_path / "b", readout=readout), base, 1e-6
    )


def test_adapters_are_tempered_and_full_experts_agree_by_default(
    tmp_path: Path, workshop: Any, llamas: tuple[Path, list[Path]]
) -> None:
    base, adapters = llamas
    full = workshop.merged(base, adapters[0], "full")
    store = store_of(tmp_path / "store", base, [full, *adapters[1:]], EXACT)

    def readout(**chosen: object) -> str:
        card: str = (store.export(tmp_path / "out", overwrite=True, **chosen) / "README.md").read_text("utf-8")
        return card.partition("* Readout: `")[2].partition("`")[0]

    assert readout() == readout(without=["expert1"]) == "tempered"
    assert readout(only=["expert0"]) == readout(readout="agree") == "agree"


def test_an_adapter_that_comes_to_full_experts_is_inspected_as_it_would_be_read_out(
    tmp_path: Path, workshop: Any, llamas: tuple[Path, list[Path]]
) -> None:
    base, adapters = llamas
    store = store_of(tmp_path / "store", base, [workshop.merged(base, adapters[0], "full")], EXACT)
    told = store.inspect(adapters[1]).interference
    store.add(adapters[1])
    with store.snapshot() as snapshot:
        found = snapshot.reading(store.engine).interference(store.engine, store.progress)
    assert told is not None and told.damage == pytest.approx(found.damage, rel=1e-9)


def test_tempered_adapters_move_the_base_as_far_as_they_do_in_the_mean(
    tmp_path: Path, llamas: tuple[Path, list[Path]]
) -> None:
    base, adapters = llamas
    store = store_of(tmp_path / "store", base, adapters, EXACT)
    name = "model.layers.0.self_attn.q_proj.weight"
    with store.snapshot() as snapshot:
        norms = [float(reader.read(name)["norm2"]) ** 0.5 for reader in snapshot.readers.values()]
    with open_checkpoint(base) as before, open_checkpoint(store.export(tmp_path / "merged")) as after:
        moved = float((after.read(name) - before.read(name)).norm())
    assert moved == pytest.approx(sum(norms) / len(norms), rel=1e-4)


def test_an_entry_has_the_rank_of_its_adapter(tmp_path: Path, llamas: tuple[Path, list[Path]]) -> None:
    base, adapters = llamas
    store = store_of(tmp_path / "store", base, adapters, Ledger(budget=8))
    with store.snapshot() as snapshot:
        for rank, reader in enumerate(snapshot.readers.values(), 2):
            entry = reader.read("model.layers.0.self_attn.q_proj.weight")
            assert entry["sigma"].shape == (rank,)
            assert entry["norm2"] == pytest.approx(float(entry["sigma"].square().sum()), rel=1e-12)
            assert reader.read("model.norm.weight") == {}, "what an adapter leaves alone takes no room"


def test_the_merged_model_is_an_adapter_again(tmp_path: Path, workshop: Any, llamas: tuple[Path, list[Path]]) -> None:
    base, adapters = llamas
    store = store_of(tmp_path / "store", base, adapters, EXACT)
    for readout in ("agree", "tsv"):
        energy = store.export_adapter(tmp_path / readout, dtype="float64", readout=readout)
        assert energy.lost_share < 1e-20
        full = store.export(tmp_path / f"{readout}-full", readout=readout)
        assert_same_model(workshop.merged(base, tmp_path / readout, f"{readout}-peft"), full, base, 1e-6)


def test_every_expert_is_an_adapter_again_and_peft_switches_between_them(
    tmp_path: Path, workshop: Any, llamas: tuple[Path, list[Path]]
) -> None:
    base, adapters = llamas
    store = store_of(tmp_path / "store", base, adapters, EXACT)
    store.export_adapters(tmp_path / "loras", dtype="float64")
    names = [entry.name for entry in store.history]
    assert sorted(path.name for path in (tmp_path / "loras").iterdir() if path.is_dir()) == sorted(names)
    served = peft.PeftModel.from_pretrained(workshop.load(base), tmp_path / "loras" / names[0], adapter_name=names[0])
    for name in names[1:]:
        served.load_adapter(tmp_path / "loras" / name, adapter_name=name)
    tokens = torch.arange(12).view(2, 6)
    for name, adapter in zip(names, adapters, strict=True):
        served.set_adapter(name)
        alone = peft.PeftModel.from_pretrained(workshop.load(base), adapter)
        with torch.no_grad():
            assert torch.allclose(served(tokens).logits, alone(tokens).logits, atol=1e-5)


def test_a_chosen_rank_tells_what_it_leaves_out(tmp_path: Path, llamas: tuple[Path, list[Path]]) -> None:
    base, adapters = llamas
    store = store_of(tmp_path / "store", base, adapters, EXACT)
    assert store.export_adapter(tmp_path / "one", readout="expert:expert1", rank=3).lost_share < 1e-12
    assert 0.01 < store.export_adapter(tmp_path / "cut", readout="expert:expert1", rank=1).lost_share < 1
    energies = store.export_adapters(tmp_path / "all", rank=2)
    assert energies["expert0"].lost_share < 1e-12 < 0.01 < energies["expert2"].lost_share


def test_full_experts_become_adapters_of_the_rank_that_their_entries_have(
    tmp_path: Path, workshop: Any, llamas: tuple[Path, list[Path]]
) -> None:
    """Biases and norms go along whole."""
    base, adapters = llamas
    merged = [workshop.merged(base, adapter, f"m{s}") for s, adapter in enumerate(adapters)]
    store = store_of(tmp_path / "store", base, merged, EXACT)
    store.export_adapter(tmp_path / "lora", readout="expert:expert1", dtype="float64")
    full = store.export(tmp_path / "full", readout="expert:expert1")
    assert_same_model(workshop.merged(base, tmp_path / "lora", "again"), full, base, 1e-6)


def test_a_base_known_by_its_config_alone_serves_adapters(
    tmp_path: Path, workshop: Any, llamas: tuple[Path, list[Path]]
) -> None:
    base, adapters = llamas
    (base / "model.safetensors").rename(tmp_path / "weights")
    store = Store.create(tmp_path / "store", base, EXACT, config_only=True)
    for adapter in adapters:
        store.add(adapter)
    store.verify()
    store.export_adapter(tmp_path / "lora")
    store.export_adapters(tmp_path / "loras")
    with pytest.raises(MergestreamError, match="its weights are needed now"):
        store.export(tmp_path / "full")
    (tmp_path / "weights").rename(base / "model.safetensors")
    store.relocate(base)
    store.export(tmp_path / "full")


def test_an_adapter_and_a_full_checkpoint_share_a_ledger(
    tmp_path: Path, workshop: Any, llamas: tuple[Path, list[Path]]
) -> None:
    base, adapters = llamas
    full = workshop.merged(base, adapters[1], "m1")
    mixed = store_of(tmp_path / "mixed", base, [adapters[0], full, adapters[2]], EXACT)
    alike = store_of(tmp_path / "alike", base, adapters, EXACT)
    assert_same_model(mixed.export(tmp_path / "a"), alike.export(tmp_path / "b"), base, 1e-6)
    with open_checkpoint(tmp_path / "a") as written:
        assert all(bool(written.read(name).isfinite().all()) for name in written.tensors)


def test_an_expert_whose_name_is_no_directory_is_refused(
    tmp_path: Path, llamas: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a store by an older version may have."""
    base, adapters = llamas
    monkeypatch.setattr("mergestream.store.add.free_name", lambda name, *_: name)
    store = Store.create(tmp_path / "store", base, EXACT)
    store.add(adapters[0], name="legal/contracts")
    with pytest.raises(UsageError, match=r"legal/contracts cannot be the name of a directory.*expert:legal/contracts"):
        store.export_adapters(tmp_path / "loras")
    assert not (tmp_path / "loras").exists()
