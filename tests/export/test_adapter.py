"""Export a merged adapter that PEFT loads, also from a base without weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergestream import LAWA, OPCM, Average, Store
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError
from mergestream.progress import Progress
from tests.experts.adapters.test_store import assert_same_model, in_factors, material, store_of  # noqa: F401
from tests.workshop import clip, edit_config, gpt2, llama


@pytest.mark.parametrize("method", [OPCM(), Average(), LAWA(window=2)], ids=str)
def test_peft_loads_what_was_merged(tmp_path: Path, workshop: Any, material: Any, method: Any) -> None:  # noqa: F811
    base, adapters, _ = material
    store = store_of(tmp_path / "store", base, adapters, method)
    energy = store.export_adapter(tmp_path / "lora", dtype="float64")
    assert energy.lost_share < 1e-20
    full = store.export(tmp_path / "full")
    assert_same_model(workshop.merged(base, tmp_path / "lora"), full, base)
    card = (tmp_path / "lora" / "README.md").read_text()
    assert "library_name: peft" in card
    assert "expert2" in card


@pytest.mark.parametrize(("model", "targets"), [(gpt2, "all-linear"), (clip, ["q_proj", "patch_embedding", "fc1"])])
def test_other_architectures(tmp_path: Path, workshop: Any, model: Any, targets: Any) -> None:
    base = workshop.base(model)
    adapters = [workshop.adapter(base, f"a{s}", seed=s, r=1 + s, target_modules=targets) for s in range(2)]
    store = store_of(tmp_path / "store", base, adapters, OPCM())
    store.export_adapter(tmp_path / "lora", dtype="float64")
    assert_same_model(workshop.merged(base, tmp_path / "lora"), store.export(tmp_path / "full"), base)


def test_loaded_without_merging_it_gives_the_same_logits(tmp_path: Path, workshop: Any, material: Any) -> None:  # noqa: F811
    base, adapters, _ = material
    store = store_of(tmp_path / "store", base, adapters, OPCM())
    store.export_adapter(tmp_path / "lora", dtype="float64")
    tokens = torch.arange(12).view(2, 6)
    adapted = peft.PeftModel.from_pretrained(workshop.load(base), tmp_path / "lora")
    merged = workshop.load(store.export(tmp_path / "full"))
    with torch.no_grad():
        assert torch.allclose(adapted(tokens).logits, merged(tokens).logits, atol=1e-10)


def test_a_chosen_rank_returns_the_energy_it_cuts_off(tmp_path: Path, material: Any) -> None:  # noqa: F811
    base, adapters, _ = material
    store = store_of(tmp_path / "store", base, adapters, OPCM())
    shares = [store.export_adapter(tmp_path / f"r{k}", rank=k).lost_share for k in (1, 2, 4, 8)]
    assert shares == sorted(shares, reverse=True)
    assert 0.01 < shares[0] < 1
    assert shares[-1] < 1e-12
    with open_checkpoint(tmp_path / "r2" / "adapter_model.safetensors") as written:
        assert {info.dtype for info in written.tensors.values()} == {"F32"}
        assert max(min(info.shape) for info in written.tensors.values()) == 2


def test_dense_states_need_a_rank(tmp_path: Path, workshop: Any, material: Any) -> None:  # noqa: F811
    base, adapters, merged = material
    store = store_of(tmp_path / "store", base, [adapters[0], merged[1]], OPCM())
    with pytest.raises(MergestreamError, match=r"is dense.*--rank K"):
        store.export_adapter(tmp_path / "lora")
    energy = store.export_adapter(tmp_path / "lora", rank=16, dtype="float64")
    assert energy.lost_share < 1e-20  # the task vectors were of low rank after all
    assert_same_model(workshop.merged(base, tmp_path / "lora"), store.export(tmp_path / "full"), base, 1e-9)


def test_biases_and_norms_are_written_whole(tmp_path: Path, workshop: Any) -> None:
    base = workshop.base(gpt2)
    fields = {"r": 2, "target_modules": ["c_attn"]}
    adapters = [
        workshop.adapter(base, "one", **fields, bias="lora_only"),
        workshop.adapter(base, "two", **fields, modules_to_save=["ln_f"]),
    ]
    store = store_of(tmp_path / "store", base, adapters, Average())
    store.export_adapter(tmp_path / "lora", dtype="float64")
    assert_same_model(workshop.merged(base, tmp_path / "lora"), store.export(tmp_path / "full"), base)


def test_a_changed_bias_needs_no_copy_of_its_weight(tmp_path: Path, workshop: Any) -> None:
    base = workshop.base(gpt2)
    adapter = workshop.adapter(base, r=2, target_modules=["c_attn"], bias="all")
    store = store_of(tmp_path / "store", base, [adapter], Average())
    store.export_adapter(tmp_path / "lora", dtype="float64")
    assert_same_model(workshop.merged(base, tmp_path / "lora"), store.export(tmp_path / "full"), base)
    written = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert all("lora_" in key or key.endswith(".bias") for key in written)


def test_a_norm_is_written_with_its_unchanged_bias(tmp_path: Path, workshop: Any) -> None:
    base = workshop.base(gpt2)
    adapter = workshop.adapter(base, r=2, target_modules=["c_attn"], modules_to_save=["ln_f"])
    state = load_file(adapter / "adapter_model.safetensors")
    del state["base_model.model.transformer.ln_f.bias"]
    save_file(state, adapter / "adapter_model.safetensors")
    store = store_of(tmp_path / "store", base, [adapter], Average())
    store.export_adapter(tmp_path / "lora", dtype="float64")
    assert_same_model(workshop.merged(base, tmp_path / "lora"), store.export(tmp_path / "full"), base)


def without_weights(base: Any, place: Any) -> Any:
    place.mkdir()
    shutil.copy(base / "config.json", place)
    return place


@pytest.mark.parametrize("model", [llama, gpt2, clip])
def test_a_base_known_by_its_config_alone(tmp_path: Path, workshop: Any, model: Any) -> None:
    base = workshop.base(model, tie_word_embeddings=True) if model is llama else workshop.base(model)
    targets = ["c_attn"] if model is gpt2 else ["q_proj"]
    adapters = [workshop.adapter(base, f"a{s}", seed=s, r=2, target_modules=targets) for s in range(2)]
    config = without_weights(base, tmp_path / "config")
    store = store_of(tmp_path / "store", config, adapters, OPCM())
    full = store_of(tmp_path / "full", base, adapters, OPCM())
    assert store.manifest.base.tensors.keys() == full.manifest.base.tensors.keys()
    assert store.history[-1].state == full.history[-1].state
    store.verify()
    store.export_adapter(tmp_path / "lora", dtype="float64")
    with pytest.raises(MergestreamError, match=r"the base cannot be opened.*--base"):
        store.export(tmp_path / "out")
    store.relocate(base)
    assert store.manifest.base == full.manifest.base
    store.verify()
    assert_same_model(store.export(tmp_path / "a"), full.export(tmp_path / "b"), base)


def test_an_older_checkpoint_has_other_names_than_its_class(tmp_path: Path, workshop: Any) -> None:
    base = workshop.base(gpt2)
    adapter = workshop.adapter(base, r=2, target_modules=["c_attn"])
    config = without_weights(base, tmp_path / "config")
    old = without_weights(base, tmp_path / "old")
    state = load_file(base / "model.safetensors")
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    save_file({**renamed, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, old / "model.safetensors")
    store = store_of(tmp_path / "store", config, [adapter], OPCM())
    store.relocate(old)
    store.verify()
    expected = store_of(tmp_path / "expected", base, [adapter], OPCM()).export(tmp_path / "b")
    assert_same_model(store.export(tmp_path / "a"), expected, base)
    direct = store_of(tmp_path / "direct", old, [adapter], OPCM())  # the adapter's names find the stored ones
    merged = open_checkpoint(direct.export(tmp_path / "c"))
    name = "h.0.attn.c_attn.weight"
    assert torch.equal(merged.read(name), open_checkpoint(expected).read(f"transformer.{name}"))


def test_weights_are_not_read_before_they_are_needed(
    tmp_path: Path,
    material: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, adapters, merged = material
    reads: list[str] = []
    import mergestream.checkpoints.checkpoint as formats

    original = formats.FileCheckpoint.read

    def read(self: formats.FileCheckpoint, name: str) -> Any:
        if self.source == str(base):
            reads.append(name)
        return original(self, name)

    monkeypatch.setattr(formats.FileCheckpoint, "read", read)
    store = Store.create(tmp_path / "store", base, OPCM(), config_only=True)
    store.add(adapters[0])
    store.add(adapters[2])
    store.export_adapter(tmp_path / "lora")
    assert not reads
    assert not store.manifest.base.measured
    store.add(merged[1])
    assert reads
    assert Store(store.path).manifest.base.measured
    dense = store_of(tmp_path / "dense", base, [merged[0], merged[2], merged[1]], OPCM())
    assert_same_model(store.export(tmp_path / "a"), dense.export(tmp_path / "b"), base)


def test_another_model_in_place_of_the_base_is_refused(tmp_path: Path, workshop: Any) -> None:
    base = workshop.base(llama)
    store = Store.create(tmp_path / "store", without_weights(base, tmp_path / "config"), OPCM())
    with pytest.raises(MergestreamError, match="is not the base of this store"):
        store.relocate(workshop.base(gpt2, "other"))


def test_whole_modules_need_the_weights(tmp_path: Path, workshop: Any) -> None:
    base = workshop.base(llama)
    adapter = workshop.adapter(base, r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    store = Store.create(tmp_path / "store", without_weights(base, tmp_path / "config"), OPCM())
    with pytest.raises(MergestreamError, match=r"the base cannot be opened.*--base"):
        store.add(adapter)
    store.relocate(base)
    store.add(adapter)
    assert not in_factors(store)["lm_head.weight"]


def test_quantised_bases_are_refused(tmp_path: Path, workshop: Any) -> None:
    base = workshop.base(llama)
    config = without_weights(base, tmp_path / "config")
    fields = json.loads((config / "config.json").read_text())
    (config / "config.json").write_text(json.dumps({**fields, "quantization_config": {"bits": 4}}))
    with pytest.raises(MergestreamError, match="quantization_config"):
        Store.create(tmp_path / "store", config, OPCM())


class Notes(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_an_adapter_that_names_another_base_is_noted(tmp_path: Path, workshop: Any) -> None:
    base = workshop.base(llama)
    adapter = workshop.adapter(base, r=2, target_modules=["q_proj"])
    store = Store.create(tmp_path / "store", base, OPCM(), progress=(notes := Notes()))
    store.inspect(adapter)
    assert not notes.notes
    edit_config(adapter, base_model_name_or_path="somebody/another-7b")
    store.add(adapter)
    assert "made for somebody/another-7b" in notes.notes[0]


def test_an_embedding_that_is_not_the_bases_is_refused(tmp_path: Path, workshop: Any) -> None:
    base, other = workshop.base(llama), workshop.base(llama, "other")
    model = workshop.load(other)
    model.model.embed_tokens.weight.data += 1
    model.save_pretrained(other)
    adapter = workshop.adapter(other, r=2, target_modules=["embed_tokens"])
    store = Store.create(tmp_path / "store", base, OPCM())
    with pytest.raises(MergestreamError, match="made for another model"):
        store.add(adapter)
