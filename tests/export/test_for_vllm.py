"""Adapters of one rank, and adapters that vLLM takes: PEFT loads them, and vLLM's rules for files hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mergestream import Average, Ledger, Store
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError, MergestreamWarning
from tests.conftest import RunCommand
from tests.workshop import Workshop, clip, llama, peft

RANKS: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {r"layers\.1\..*q_proj": 7}}
pytestmark = pytest.mark.filterwarnings("ignore::mergestream.errors.MergestreamWarning")


def told(adapter: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    return fields


def check_as_vllm(adapter: Path, rank: int) -> None:
    """What vLLM checks of a file and a config, by its documentation (PEFTHelper and LoRAModel)."""
    config = told(adapter)
    assert (config["r"], config["lora_alpha"]) == (rank, rank) and isinstance(config["target_modules"], list)
    assert config["bias"] == "none" and not config["modules_to_save"] and not config["rank_pattern"]
    for key, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, factor, last = key.rsplit(".", 2)
        assert last == "weight" and factor in ("lora_A", "lora_B"), key
        assert module.removeprefix("base_model.model.") in config["target_modules"]
        assert tensor.shape[factor == "lora_B"] == rank


def same_change(workshop: Workshop, base: Path, one: Path, other: Path) -> bool:
    merged = [open_checkpoint(workshop.merged(base, each, f"merged-{each.name}")) for each in (one, other)]
    return all(
        torch.allclose(merged[0].read(name), merged[1].read(name), rtol=0, atol=1e-12) for name in merged[0].tensors
    )


@pytest.fixture
def store(workshop: Workshop) -> Store:
    """A ledger with one adapter whose modules have the ranks 2 and 7, kept as they are."""
    base = workshop.base(llama)
    store = Store.create(workshop.directory / "store", base, Ledger(budget=8, entries="float32"))
    store.add(workshop.adapter(base, **RANKS))
    return store


@pytest.mark.parametrize(
    ("options", "rank"), [({"rank": 7}, 7), ({"rank": 64}, 64), ({"server": "vllm"}, 8)], ids=["7", "64", "vllm"]
)
def test_one_rank_for_all_loses_nothing(store: Store, workshop: Workshop, options: dict[str, Any], rank: int) -> None:
    base = workshop.directory / "base"
    mixed, padded = workshop.directory / "mixed", workshop.directory / "padded"
    store.export_adapter(mixed, dtype="float64")
    assert sorted({told(mixed)["r"], *told(mixed)["rank_pattern"].values()}) == [2, 7]
    assert store.export_adapter(padded, dtype="float64", **options).lost_share == 0
    check_as_vllm(padded, rank)
    assert same_change(workshop, base, mixed, padded)


def test_a_rank_is_cut_then_padded_for_vllm(store: Store, workshop: Workshop) -> None:
    base, cut = workshop.directory / "base", workshop.directory / "cut"
    lost = store.export_adapter(cut, rank=3, server="vllm", dtype="float64").lost_share
    check_as_vllm(cut, 8)
    assert lost == store.export_adapter(workshop.directory / "three", rank=3, dtype="float64").lost_share > 0
    assert same_change(workshop, base, cut, workshop.directory / "three")


def test_what_peft_saves_again_is_read_again(store: Store, workshop: Workshop) -> None:
    """Different ranks survive PEFT's own round trip, by expressions that match one module each."""
    base, out, again = (workshop.directory / name for name in ("base", "out", "again"))
    store.export_adapter(out, dtype="float64")
    peft.PeftModel.from_pretrained(workshop.load(base), out).save_pretrained(again)
    assert same_change(workshop, base, out, again)
    expressions = told(out)["rank_pattern"]
    assert all(expression.startswith("^model\\.layers\\.1\\.") for expression in expressions)
    other = Store.create(workshop.directory / "other", base, Ledger(budget=8, entries="float32"))
    other.add(again)
    other.export_adapter(workshop.directory / "back", dtype="float64")
    assert told(workshop.directory / "back")["rank_pattern"] == expressions


@pytest.mark.parametrize(
    ("model", "fields", "left_out"),
    [
        (llama, {"modules_to_save": ["lm_head"]}, ["lm_head.weight"]),
        (llama, {"target_modules": ["q_proj", "embed_tokens"]}, ["model.embed_tokens.weight"]),
        (llama, {"target_modules": ["q_proj", "lm_head"]}, ["lm_head.weight"]),
        (clip, {"target_modules": ["q_proj", "patch_embedding"]}, ["vision_model.embeddings.patch_embedding.weight"]),
        (clip, {"bias": "lora_only"}, ["text_model.encoder.layers.0.self_attn.q_proj.bias"]),
    ],
    ids=["whole", "embedding", "head", "convolution", "bias"],
)
def test_what_vllm_refuses_is_left_out_and_its_cost_is_said(
    workshop: Workshop, mergestream: RunCommand, model: Callable[..., Any], fields: dict[str, Any], left_out: list[str]
) -> None:
    base, out = workshop.base(model), workshop.directory / "out"
    options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], **fields}
    adapter = workshop.adapter(base, "mixed", **options)
    store = Store.create(workshop.directory / "store", base, Average())
    store.add(adapter)
    found = mergestream("export", store.path, out, "--format", "lora", "--for", "vllm", "--json")
    assert found.code == 0, found.err
    reply = json.loads(found.out)
    check_as_vllm(out, 8)
    note = next(note for note in reply["notes"] if "left out, because vLLM may refuse them" in note)
    assert left_out[0] in note and "--format full has everything" in note
    theta, theirs = open_checkpoint(base), open_checkpoint(workshop.merged(base, adapter, "theirs"))
    ours = open_checkpoint(workshop.merged(base, out, "ours"))
    total = lost = 0.0
    for name in theta.tensors:
        change, difference = theirs.read(name) - theta.read(name), theirs.read(name) - ours.read(name)
        total, lost = total + float(change.square().sum()), lost + float(difference.square().sum())
    assert reply["lost"] == pytest.approx(lost / total, rel=1e-4) and 0 < reply["lost"] < 1
    assert f"with {reply['lost']:.3%} of the energy" in note


def test_every_expert_for_vllm(workshop: Workshop, mergestream: RunCommand) -> None:
    base = workshop.base(llama)
    one = workshop.adapter(base, "one", **RANKS)
    two = workshop.adapter(base, "two", 2, r=12, target_modules=["q_proj"], modules_to_save=["lm_head"])
    store = Store.create(workshop.directory / "store", base, Ledger(budget=8, entries="float32"))
    store.add(one)
    store.add(two)
    found = mergestream("export", store.path, workshop.directory / "all", "--format", "loras", "--for", "vllm")
    assert found.code == 0 and "note: two: left out, because vLLM may refuse them: lm_head.weight" in found.err
    check_as_vllm(workshop.directory / "all" / "one", 8)
    check_as_vllm(workshop.directory / "all" / "two", 16)
    model = peft.PeftModel.from_pretrained(workshop.load(base), workshop.directory / "all" / "one", adapter_name="one")
    model.load_adapter(workshop.directory / "all" / "two", adapter_name="two")


def test_an_embedding_with_factors_is_noted(workshop: Workshop) -> None:
    base = workshop.base(llama)
    store = Store.create(workshop.directory / "store", base, Average())
    store.add(workshop.adapter(base, r=2, target_modules=["q_proj", "embed_tokens"]))
    with pytest.warns(
        MergestreamWarning, match=r"factors of model.embed_tokens for some model classes only; --for vll"
    ):
        store.export_adapter(workshop.directory / "out")


def test_what_vllm_cannot_take_at_all_is_an_error(workshop: Workshop, mergestream: RunCommand) -> None:
    base = workshop.base(llama)
    store = Store.create(workshop.directory / "store", base, Average())
    store.add(workshop.adapter(base, r=2, target_modules=["embed_tokens"]))
    with pytest.raises(
        MergestreamError, match="vLLM takes no part of the adapter of adapter; export with --format full"
    ):
        store.export_adapter(workshop.directory / "out", server="vllm")
    found = mergestream("export", store.path, workshop.directory / "out", "--for", "vllm")
    assert found.code == 2 and "--for is for adapters: add --format lora" in found.err
