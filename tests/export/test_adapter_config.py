"""The configuration of a merged adapter, and the notes about servers that refuse it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from mergestream import Average, Store
from mergestream.errors import MergestreamError, MergestreamWarning
from mergestream.export.adapter import AdaptedModule
from mergestream.export.adapter_config import adapter_config, serving_notes
from tests.workshop import Workshop, edit_config, gpt2, llama

FIELDS: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "lora_dropout": 0.25}
TOKENS = torch.arange(12).view(2, 6)


def told(adapter: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    return fields


def store_of(path: Path, base: Path, *adapters: Path, **options: Any) -> Store:
    store = Store.create(path, base, **options)
    for adapter in adapters:
        store.add(adapter)
    return store


@pytest.mark.parametrize("options", [{}, {"method": Average()}], ids=["ledger", "average"])
def test_auto_classes_load_what_was_merged(tmp_path: Path, workshop: Workshop, options: dict[str, Any]) -> None:
    base = workshop.base(llama)
    adapters = [workshop.adapter(base, f"a{s}", s, task_type="CAUSAL_LM", **FIELDS) for s in (1, 2)]
    store = store_of(tmp_path / "store", base, *adapters, **options)
    store.export_adapter(tmp_path / "out")
    fields = told(tmp_path / "out")
    assert fields["task_type"] == "CAUSAL_LM" and "lora_dropout" not in fields
    assert fields["base_model_name_or_path"] == str(base) and fields["inference_mode"] is True
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    merged = workshop.load(store.export(tmp_path / "full"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, merged(TOKENS).logits, rtol=1e-3, atol=1e-4)


def test_every_adapter_of_a_ledger_keeps_its_own_fields(tmp_path: Path, workshop: Workshop) -> None:
    base = workshop.base(llama)
    one = workshop.adapter(base, "one", 1, task_type="CAUSAL_LM", **FIELDS)
    two = workshop.adapter(base, "two", 2, **FIELDS)
    store_of(tmp_path / "store", base, one, two).export_adapters(tmp_path / "all")
    found = [told(tmp_path / "all" / name) for name in ("one", "two")]
    assert [fields["task_type"] for fields in found] == ["CAUSAL_LM", None]


def test_without_a_task_type_the_config_names_the_class_of_the_base(tmp_path: Path, workshop: Workshop) -> None:
    base = workshop.base(llama)
    full = workshop.merged(base, workshop.adapter(base, **FIELDS), "full")
    store_of(tmp_path / "store", base, full).export_adapter(tmp_path / "out", rank=2)
    assert isinstance(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out"), peft.PeftModelForCausalLM)


def test_adapters_of_different_tasks_have_none_together_and_a_note(tmp_path: Path, workshop: Workshop) -> None:
    base = workshop.base(llama)
    one = workshop.adapter(base, "one", 1, task_type="CAUSAL_LM", **FIELDS)
    two = workshop.adapter(base, "two", 2, **FIELDS)
    store = store_of(tmp_path / "store", base, one, two)
    with pytest.warns(
        MergestreamWarning, match=r"different task types \(CAUSAL_LM, None\), so the merged one has none"
    ):
        store.export_adapter(tmp_path / "out", rank=2)
    assert told(tmp_path / "out")["task_type"] is None
    store.export_adapter(tmp_path / "one-again", readout="expert:one")
    assert told(tmp_path / "one-again")["task_type"] == "CAUSAL_LM"


def test_the_base_is_named_by_the_hub_id_that_all_adapters_name(tmp_path: Path, workshop: Workshop) -> None:
    base = workshop.base(llama)
    adapters = [workshop.adapter(base, f"a{s}", s, **FIELDS) for s in (1, 2)]
    for adapter in adapters:
        edit_config(adapter, base_model_name_or_path="org/llama", revision="abc")
    with pytest.warns(MergestreamWarning, match="made for org/llama"):
        store = store_of(tmp_path / "store", base, *adapters)
    store.export_adapter(tmp_path / "out", rank=2)
    assert told(tmp_path / "out")["base_model_name_or_path"] == "org/llama"
    assert told(tmp_path / "out")["revision"] == "abc"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"modules_to_save": ["ln_f"]},
            r"vLLM refuses .* modules_to_save \(transformer.ln_f\); --for vllm .*--format full",
        ),
        ({"bias": "lora_only"}, r"out: vLLM refuses .* biases \(bias=lora_only\); .*--format full"),
        (
            {"rank_pattern": {"h.0.attn.c_attn": 5}},
            r"ranks from 2 to 5 \(rank_pattern\).*--rank 5 or --for vllm gives all of them one rank",
        ),
    ],
)
def test_a_note_says_what_servers_refuse(
    tmp_path: Path, workshop: Workshop, fields: dict[str, Any], sentence: str
) -> None:
    base = workshop.base(gpt2)
    adapter = workshop.adapter(base, r=2, target_modules=["c_attn"], **fields)
    store = store_of(tmp_path / "store", base, adapter, method=Average())
    with pytest.warns(MergestreamWarning, match=sentence):
        store.export_adapter(tmp_path / "out")


@pytest.mark.parametrize(("rank", "sentence"), [(17, "--max-lora-rank 32"), (513, "513, and vLLM has at most 512")])
def test_a_note_says_which_rank_servers_need(rank: int, sentence: str) -> None:
    config = adapter_config([AdaptedModule("layer", "linear", rank, (1024, 1024))], (), {})
    assert [sentence in refusal for refusal in serving_notes(config)] == [True]
    assert not list(serving_notes({**config, "r": 16}))


def test_a_field_of_the_wrong_type_is_one_error(tmp_path: Path, workshop: Workshop) -> None:
    base = workshop.base(llama)
    adapter = workshop.adapter(base, **FIELDS)
    edit_config(adapter, task_type=["CAUSAL_LM"])
    with pytest.raises(MergestreamError, match=r"adapter_config.json.*task_type"):
        store_of(tmp_path / "store", base, adapter)
