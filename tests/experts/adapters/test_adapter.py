"""Our reading of an adapter is PEFT's: the same task vectors, in float64."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError
from mergestream.experts import make_task_vector
from mergestream.experts.names import make_translator
from tests.workshop import assert_equals_peft, bind, clip, clip_vision, edit_config, gpt2, llama, open_adapter

ATTENTION = ["q_proj", "v_proj"]
FIELDS = {
    "alpha over r": {"r": 4, "lora_alpha": 6},
    "rslora": {"r": 4, "lora_alpha": 6, "use_rslora": True},
    "rank_pattern": {"r": 4, "rank_pattern": {"q_proj": 2, r"layers\.1.+v_proj": 7}},
    "alpha_pattern": {"r": 4, "lora_alpha": 3, "alpha_pattern": {"layers.0.self_attn.q_proj": 9}},
    "both patterns": {"r": 4, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"proj": 9}, "use_rslora": True},
    "some layers": {"r": 2, "layers_to_transform": [1]},
    "without some modules": {"r": 2, "exclude_modules": ["v_proj"]},
    "gaussian": {"r": 2, "init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_scaling_is_that_of_peft(workshop: Any, fields: Any) -> None:
    base = workshop.base(llama)
    assert_equals_peft(workshop, base, workshop.adapter(base, target_modules=ATTENTION, **fields))


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        (llama, "all-linear"),
        (llama, ["embed_tokens", "down_proj"]),
        (llama, r".*layers\.1\..*(k|o)_proj"),
        (gpt2, "all-linear"),
        (gpt2, ["c_attn", "wte", "wpe"]),
        (clip, "all-linear"),
        (clip, ["q_proj", "patch_embedding", "position_embedding"]),
        (clip_vision, ["fc1", "patch_embedding"]),
    ],
)
def test_every_kind_of_module(workshop: Any, model: Any, targets: Any) -> None:
    base = workshop.base(model)
    assert_equals_peft(workshop, base, workshop.adapter(base, r=3, target_modules=targets))


@pytest.mark.parametrize("flag", [True, False])
def test_conv1d_is_transposed_whatever_the_flag_says(workshop: Any, flag: bool) -> None:
    """The attention's c_proj is square: only its neighbours show that it is stored input × output."""
    base = workshop.base(gpt2)
    adapter = workshop.adapter(base, r=3, target_modules=["c_proj", "c_fc"])
    edit_config(adapter, fan_in_fan_out=flag)
    assert_equals_peft(workshop, base, adapter)


def test_a_square_conv1d_is_transposed_by_the_model_or_the_flag(workshop: Any) -> None:
    base = workshop.base(gpt2)
    adapter = workshop.adapter(base, r=3, target_modules=r".*attn\.c_proj")
    assert open_adapter(adapter).config.fields.fan_in_fan_out  # PEFT corrects the flag
    assert_equals_peft(workshop, base, adapter)
    edit_config(adapter, fan_in_fan_out=False)
    assert_equals_peft(workshop, base, adapter)
    config = (base / "config.json").read_text()
    edit_config(adapter, fan_in_fan_out=True)
    (base / "config.json").unlink()
    bound = bind(adapter, base)
    assert all(term.transposed for terms in bound.terms.values() for term in terms)
    (base / "config.json").write_text(config)


@pytest.mark.parametrize(
    ("model", "fields", "whole"),
    [
        (llama, {"modules_to_save": ["lm_head", "model.norm"]}, {"lm_head.weight", "model.norm.weight"}),
        (gpt2, {"target_modules": ["c_attn"], "bias": "lora_only"}, None),
        (gpt2, {"target_modules": ["c_attn"], "bias": "all"}, None),
        (clip, {"modules_to_save": ["visual_projection"]}, {"visual_projection.weight"}),
    ],
)
def test_whole_tensors(workshop: Any, model: Any, fields: Any, whole: Any) -> None:
    base = workshop.base(model)
    bound = assert_equals_peft(workshop, base, workshop.adapter(base, **{"target_modules": ATTENTION, **fields}))
    assert whole is None or set(bound.whole) == whole


def test_tied_modules_add_up(workshop: Any) -> None:
    base = workshop.base(llama, tie_word_embeddings=True)
    assert "lm_head.weight" not in open_checkpoint(base).tensors
    for targets in (["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]):
        adapter = workshop.adapter(base, r=2, target_modules=targets)
        bound = assert_equals_peft(workshop, base, adapter)
        assert len(bound.terms["model.embed_tokens.weight"]) == len(targets)
        shutil.rmtree(adapter)


def test_torch_files_are_read_too(workshop: Any) -> None:
    base = workshop.base(llama)
    adapter = workshop.adapter(base, target_modules=ATTENTION)
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    assert_equals_peft(workshop, base, adapter)


def test_an_adapter_of_another_class_of_the_same_model(workshop: Any) -> None:
    """The base model alone has no ``model.`` before its layers."""
    base = workshop.base(llama)
    adapter = workshop.adapter(base, target_modules=ATTENTION)
    expected = bind(adapter, base)
    state = load_file(adapter / "adapter_model.safetensors")
    for change in ({"model.model.": "model."}, {"model.model.": "model.wrapped.model."}):
        ((old, new),) = change.items()
        renamed = {key.replace(f"base_{old}", f"base_{new}"): value for key, value in state.items()}
        assert renamed.keys() != state.keys()
        save_file(renamed, adapter / "adapter_model.safetensors")
        bound = bind(adapter, base)
        assert bound.terms.keys() == expected.terms.keys()
        name = next(iter(expected.terms))
        assert torch.equal(bound.delta(name, torch.float64).dense(), expected.delta(name, torch.float64).dense())


def test_prefixes_that_may_mean_two_things_are_refused() -> None:
    spellings = {name: name for name in ("encoder.layer.0.q.weight", "decoder.layer.0.q.weight")}
    with pytest.raises(MergestreamError, match=r"decoder\.layer\.0\.q\.weight or encoder"):
        make_translator(["layer.0.q.weight"], spellings)
    translate = make_translator(["t5.encoder.layer.0.q.weight"], spellings)
    assert translate("t5.encoder.layer.0.q.weight") == "encoder.layer.0.q.weight"
    assert translate("t5.decoder.layer.0.q.weight") == "decoder.layer.0.q.weight"
    assert translate("t5.score.weight") is None
    assert make_translator(["layer.0.q.weight"], {"layer.1.q.weight": ""})("layer.0.q.weight") is None  # another layer


def test_a_new_head_is_extra(workshop: Any) -> None:
    base = workshop.base(llama)
    adapter = workshop.adapter(base, target_modules=ATTENTION)
    state = load_file(adapter / "adapter_model.safetensors")
    save_file({**state, "base_model.model.score.weight": torch.ones(2, 16)}, adapter / "adapter_model.safetensors")
    bound = bind(adapter, base)
    assert bound.tensors.keys() - bound.model.tensors.keys() == {"score.weight"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "trains tokens or prefixes instead of weights, so there is nothing to merge"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights=loftq .* changes the base's weights"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"magic_config": {"factor": 2}}, "magic_config=.* cannot be honoured"),
        ({"r": 0}, r"Expected `int` >= 1 - at `\$\.r`"),
        ({"r": "many"}, r"Expected `int`, got `str` - at `\$\.r`"),
        ({"lora_alpha": float("nan")}, "not valid JSON with finite numbers"),
        ({"rank_pattern": {"(": 2}}, "an expression in rank_pattern cannot be honoured"),
        ({"alpha_pattern": {"q_proj": None}}, r"Expected `float`.* - at `\$\.alpha_pattern\[\.\.\.\]`"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "not valid JSON with finite numbers"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(workshop: Any, fields: Any, message: str) -> None:
    adapter = workshop.adapter(workshop.base(llama), target_modules=ATTENTION)
    edit_config(adapter, **fields)
    with pytest.raises(MergestreamError, match=f"adapter_config.json(:| is) .*{message}"):
        open_adapter(adapter)


def test_unknown_fields_that_are_off_do_no_harm(workshop: Any) -> None:
    adapter = workshop.adapter(workshop.base(llama), target_modules=ATTENTION)
    modules = open_adapter(adapter).factors.keys()
    edit_config(adapter, magic_config=None, use_magic=False)
    assert modules and open_adapter(adapter).factors.keys() == modules


def test_real_dora_and_bias_factors_are_refused_even_if_the_config_hides_them(workshop: Any) -> None:
    base = workshop.base(llama)
    for fields in ({"use_dora": True}, {"lora_bias": True}):
        adapter = workshop.adapter(base, target_modules=ATTENTION, **fields)
        assert open_adapter(adapter).config.reason == next(iter(fields))
        edit_config(adapter, **dict.fromkeys(fields, False))
        with pytest.raises(MergestreamError, match="neither a factor nor a weight"):
            open_adapter(adapter)
        shutil.rmtree(adapter)


def damaged(adapter: Any, change: Any) -> None:
    file = adapter / "adapter_model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def test_corrupt_adapters_are_refused(workshop: Any) -> None:
    base = workshop.base(llama)
    adapter = workshop.adapter(base, r=4, target_modules=ATTENTION)
    file = adapter / "adapter_model.safetensors"
    original = file.read_bytes()

    file.write_bytes(original[:-100])
    with pytest.raises(MergestreamError, match="truncated"):
        open_adapter(adapter)

    file.write_bytes(original)
    damaged(adapter, lambda state: state.pop(KEY))
    with pytest.raises(MergestreamError, match=r"the factor A of model.layers.0.self_attn.q_proj is missing"):
        open_adapter(adapter)

    file.write_bytes(original)
    damaged(adapter, lambda state: state.update({KEY: torch.ones(3, 16)}))
    with pytest.raises(MergestreamError, match=r"\[3, 16\] .* no factors of rank 4"):
        bind(adapter, base)

    file.write_bytes(original)
    damaged(adapter, lambda state: state.update({KEY: torch.ones(4, 17)}))
    with pytest.raises(MergestreamError, match=r"shape \[16, 17\], but the base's weight has the shape \[16, 16\]"):
        bind(adapter, base)

    file.write_bytes(original)
    damaged(adapter, lambda state: state[KEY].fill_(float("nan")))
    with pytest.raises(MergestreamError, match="NaN or Inf"):
        bind(adapter, base).delta("model.layers.0.self_attn.q_proj.weight", torch.float32)

    file.write_bytes(original)
    damaged(adapter, lambda state: state.update({KEY: state[KEY] * 1e45}))
    with pytest.raises(MergestreamError, match=r"factors of .*q_proj.weight, .* are too large to be merged"):
        bind(adapter, base).delta("model.layers.0.self_attn.q_proj.weight", torch.float32)

    file.write_bytes(original)
    damaged(adapter, lambda state: state.update({KEY: state[KEY].to(torch.int8)}))
    with pytest.raises(MergestreamError, match=r"lora_A.weight is I8, not floating-point; merge the adapter"):
        open_adapter(adapter)

    file.unlink()
    with pytest.raises(MergestreamError, match=r"neither adapter_model\.safetensors"):
        open_adapter(adapter)
    save_file({}, file)
    with pytest.raises(MergestreamError, match="holds no tensors"):
        open_adapter(adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(MergestreamError, match="not valid JSON"):
        open_adapter(adapter)


def test_an_adapter_of_another_model_is_refused(workshop: Any) -> None:
    adapter = workshop.adapter(workshop.base(llama), target_modules=ATTENTION)
    with pytest.raises(MergestreamError, match=r"has no tensor .*q_proj.weight: it was made for another model"):
        bind(adapter, workshop.base(gpt2, "gpt2"))


def test_factors_and_whole_tensor_together_are_refused(workshop: Any) -> None:
    base = workshop.base(llama)
    adapter = workshop.adapter(base, target_modules=ATTENTION)
    name = KEY.replace("lora_A.weight", "weight")
    damaged(adapter, lambda state: state.update({name: torch.ones(16, 16)}))
    with pytest.raises(MergestreamError, match="both factors and a full tensor"):
        bind(adapter, base)


def test_a_saved_copy_of_another_embedding_is_refused(workshop: Any) -> None:
    """PEFT saves the base's embedding beside its factors."""
    base = workshop.base(llama)
    adapter = workshop.adapter(base, target_modules=["embed_tokens"])
    name = "model.embed_tokens.weight"
    with open_checkpoint(base) as theta:
        model = BaseModel.examine(theta, measure=False)
        assert make_task_vector(model, theta, open_adapter(adapter)).factors(name).any()
        damaged(adapter, lambda state: next(t for key, t in state.items() if "base_layer" in key).add_(1))
        with pytest.raises(MergestreamError, match=rf"base_layer\.weight is not {name} of the base: the adapter was"):
            make_task_vector(model, theta, open_adapter(adapter)).factors(name)


def test_a_pickle_is_never_executed(workshop: Any) -> None:
    adapter = workshop.adapter(workshop.base(llama), target_modules=ATTENTION)
    text = json.loads((adapter / "adapter_config.json").read_text())
    assert text["peft_type"] == "LORA"
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"x": open_adapter}, adapter / "adapter_model.bin")
    with pytest.raises(MergestreamError, match="not executed"):
        open_adapter(adapter)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_alpha": 10**400}, r"at `\$\.lora_alpha`"),
        ({"r": 10**400}, r"at `\$\.r`"),
        ({"alpha_pattern": {"q_proj": 10**400}}, r"Number out of range - at `\$\.alpha_pattern\[\.\.\.\]`"),
        ({"rank_pattern": {"a{99999999999}": 2}}, "expression in rank_pattern cannot be honoured .*counted repeats"),
        ({"rank_pattern": {"(?i)a": 2}}, "expression in rank_pattern cannot be honoured .*flags"),
    ],
)
def test_invalid_numbers_and_expressions_are_refused(workshop: Any, fields: Any, message: str) -> None:
    adapter = workshop.adapter(workshop.base(llama), target_modules=ATTENTION)
    edit_config(adapter, **fields)
    with pytest.raises(MergestreamError, match=f"adapter_config.json(:| is) .*{message}"):
        open_adapter(adapter)


@pytest.mark.parametrize("alpha", [1e308, 1e200])
def test_a_scaling_that_overflows_is_refused(workshop: Any, alpha: float) -> None:
    base = workshop.base(llama)
    adapter = workshop.adapter(base, target_modules=ATTENTION)
    edit_config(adapter, lora_alpha=alpha)
    with pytest.raises(MergestreamError, match=r"adapter_model.*lora_alpha in adapter_config.json, are too large"):
        bind(adapter, base).delta("model.layers.0.self_attn.q_proj.weight", torch.float32)
