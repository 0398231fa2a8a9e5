"""Adapters that are more than s·B·A: PEFT merges them module by module, and the result is merge_and_unload's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergestream import Average, Ledger, Store
from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError
from mergestream.experts import make_task_vector, open_expert
from mergestream.experts.adapters.adapter import BoundAdapter
from mergestream.experts.adapters.peft_merge import COPIES
from mergestream.inputs.loading import read_weights
from tests.workshop import TEXT, Workshop, clip, edit_config, gpt2, llama, open_adapter

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

MODULES: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj", "up_proj"]}
PATTERNS = {"rank_pattern": {"q_proj": 2, r"layers\.1.+v_proj": 7}, "alpha_pattern": {"up_proj": 9}}
KINDS: dict[str, dict[str, Any]] = {
    "LOHA": {**MODULES, **PATTERNS, "r": 4},
    "LOKR": {**MODULES, "r": 4},
    "IA3": {**MODULES, "feedforward_modules": ["down_proj"]},
    "VERA": {**MODULES, "r": 4},
    "PVERA": MODULES,
    "RANDLORA": MODULES,
    "VBLORA": {**MODULES, "vector_length": 4, "num_vectors": 10},
    "OFT": {**MODULES, "oft_block_size": 4},
    "BOFT": {**MODULES, "boft_block_size": 4},
    "ADALORA": {**MODULES, "total_step": 10},
    "FOURIERFT": {**MODULES, "n_frequency": 20},
    "HRA": MODULES,
    "MISS": {**MODULES, "r": 4},
    "LN_TUNING": {"target_modules": ["norm", "input_layernorm"]},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1, 5]},
    "C3A": {**MODULES, "block_size": 8},
    "ROAD": {**MODULES, "group_size": 8},
    "SHIRA": {**MODULES, "r": 2},
    "WAVEFT": {**MODULES, "n_frequency": 20},
    **dict.fromkeys(["ADAMSS", "DEFT", "DELORA", "GLORA", "GRALORA", "HIRA", "OSF", "PEANUT", "SUPERTUNING"], MODULES),
}
LORAS: dict[str, dict[str, Any]] = {
    "DoRA": {**MODULES, **PATTERNS, "use_dora": True, "use_rslora": True},
    "DoRA and a saved module": {**MODULES, "use_dora": True, "modules_to_save": ["lm_head"]},
    "trained tokens": {**MODULES, "trainable_token_indices": [1, 3]},
    "trained tokens of a module": {**MODULES, "use_dora": True, "trainable_token_indices": {"embed_tokens": [1, 3]}},
    "QALoRA": {**MODULES, "use_qalora": True},
    "parameters": {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"]},
}
OTHERS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "VeRA without its projections": (llama, "VERA", {**MODULES, "save_projection": False}),
    "DoRA of Conv1D": (gpt2, "LORA", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "biases of Conv1D": (gpt2, "LORA", {"target_modules": ["c_attn", "c_proj"], "lora_bias": True}),
    "IA3 of Conv1D": (gpt2, "IA3", {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]}),
    "BEFT": (clip, "BEFT", {"target_modules": ["v_proj", "fc1"]}),
    "IA3 with biases": (clip, "IA3", {"target_modules": ["q_proj", "fc1"], "feedforward_modules": []}),
    "DoRA of convolutions": (
        clip,
        "LORA",
        {"target_modules": ["q_proj", "patch_embedding", "position_embedding"], "use_dora": True, "bias": "all"},
    ),
    "LoHa of convolutions": (clip, "LOHA", {"target_modules": ["q_proj", "patch_embedding"]}),
    "LoKr of convolutions": (clip, "LOKR", {"target_modules": ["q_proj", "patch_embedding"]}),
}
IN_FLOAT32: list[dict[str, Any]] = [
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "olora"},
    {"kind": "PSOFT", "r": 4},
]
CASES = {
    **{name: (llama, name, fields) for name, fields in KINDS.items()},
    **{name: (llama, "LORA", fields) for name, fields in LORAS.items()},
    **OTHERS,
}


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TEXT, num_key_value_heads=1, num_local_experts=4)
    )


def gpt_oss(**options: Any) -> Any:
    sizes = {**TEXT, "head_dim": 8, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes | options))


def square_gpt_oss() -> Any:
    """As in the real one, the shape of an expert's second weight does not show which side is the input."""
    return gpt_oss(intermediate_size=TEXT["hidden_size"])


def changes(base: Path, expert: Path) -> dict[str, torch.Tensor]:
    """Our task vectors."""
    theta = open_checkpoint(base)
    model = BaseModel.examine(theta)
    vector = make_task_vector(model, theta, open_expert(expert))
    return {name: vector.whole(name) for name in vector.names}


def assert_as_peft(workshop: Workshop, base: Path, adapter: Path, tolerance: float = 1e-12) -> None:
    ours, theta = changes(base, adapter), open_checkpoint(base)
    merged = open_checkpoint(workshop.merged(base, adapter))
    moved = 0
    for name, delta in ours.items():
        theirs = merged.read(name) - theta.read(name)
        assert float((delta - theirs).abs().max()) <= tolerance * float(theirs.abs().max()), name
        moved += bool(theirs.any())
    assert moved


PROMPTS = [
    "PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "ADAPTION_PROMPT",
    "CPT",
    "CARTRIDGE",
    "MULTITASK_PROMPT_TUNING",
]
BY_INPUT = ["LILY", "POLY", "SHADOW", "XLORA"]
WHOLE_MODEL = ["FROD", "TINYLORA", "UNILORA"]


def test_every_type_of_peft_is_merged_or_refused_by_name() -> None:
    merged = {kind for _, kind, _ in CASES.values()} | {"PSOFT"}
    assert {str(kind.value) for kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING} == {
        *merged,
        *PROMPTS,
        *BY_INPUT,
        *WHOLE_MODEL,
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_merged_as_peft_does(workshop: Workshop, case: Any) -> None:
    make, kind, fields = case
    base = workshop.base(make)
    assert_as_peft(workshop, base, workshop.adapter(base, kind=kind, **fields))


@pytest.mark.parametrize("make", [mixtral, gpt_oss, square_gpt_oss])
@pytest.mark.parametrize("parameters", [["gate_up_proj", "down_proj"], ["down_proj"]], ids=len)
def test_stacks_of_experts(workshop: Workshop, make: Any, parameters: list[str]) -> None:
    torch.manual_seed(0)
    base = workshop.directory / "base"
    make().double().save_pretrained(base, save_original_format=False)
    targets = [f"mlp.experts.{name}" for name in parameters]
    adapter = workshop.adapter(base, r=2, target_modules=["q_proj"], target_parameters=targets)
    merged = peft.PeftModel.from_pretrained(workshop.load(base), adapter).merge_and_unload().state_dict()
    theta, ours = open_checkpoint(base), changes(base, adapter)
    moved = {name for name, delta in ours.items() if delta.any()}
    assert len(moved) == 2 + 2 * len(parameters)
    for name, delta in ours.items():
        torch.testing.assert_close(delta, merged[name] - theta.read(name), rtol=0, atol=1e-14)


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_adapters_of_stacks_through_a_store(workshop: Workshop, make: Any) -> None:
    torch.manual_seed(0)
    base = workshop.directory / "base"
    make().save_pretrained(base, save_original_format=False)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    store = Store.create(workshop.directory / "store", base, Ledger(budget=8, entries="float32"))
    for seed, name in enumerate(("one", "two"), 1):
        store.add(workshop.adapter(base, name, seed, r=2, target_modules=["q_proj"], target_parameters=targets))
    again = workshop.load(store.export(workshop.directory / "again", readout="expert:two")).eval()
    peft_model = peft.PeftModel.from_pretrained(workshop.load(base), workshop.directory / "two").eval()
    ids = torch.tensor([[3, 7, 5]])
    with torch.no_grad():
        expected, found, before = (model(ids).logits for model in (peft_model, again, workshop.load(base).eval()))
    assert float((found - expected).norm()) < 1e-4 * float((expected - before).norm())


def test_a_base_with_single_experts_needs_a_copy_with_stacks(workshop: Workshop) -> None:
    fused = workshop.directory / "fused"
    mixtral().save_pretrained(fused, save_original_format=False)
    adapter = workshop.adapter(fused, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])
    with pytest.raises(MergestreamError, match=r"experts\.gate_up_proj, which .*save_original_format=False"):
        changes(workshop.base(mixtral, "single"), adapter)


@pytest.mark.parametrize("fields", IN_FLOAT32, ids=str)
def test_initialisations_that_change_the_base_are_repeated(workshop: Workshop, fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    base = workshop.directory / "base"
    llama().save_pretrained(base)
    assert_as_peft(workshop, base, workshop.adapter(base, **fields, **MODULES), 1e-6)


def test_through_a_store(tmp_path: Path, workshop: Workshop) -> None:
    base = workshop.base(llama)
    adapters = [
        workshop.adapter(base, "dora", use_dora=True, **MODULES),
        workshop.adapter(base, "loha", seed=2, kind="LOHA", **MODULES),
        workshop.adapter(base, "plain", seed=3, **MODULES),
    ]
    merged = [open_checkpoint(workshop.merged(base, adapter, f"{adapter.name}-merged")) for adapter in adapters]
    average = Store.create(tmp_path / "average", base, Average())
    ledger = Store.create(tmp_path / "ledger", base, Ledger(budget=8, entries="float32"))
    for adapter in adapters:
        average.add(adapter)
        ledger.add(adapter)
    mean = open_checkpoint(average.export(tmp_path / "mean-of-all"))
    dora = open_checkpoint(ledger.export(tmp_path / "again", readout="expert:dora"))
    for name in mean.tensors:
        expected = sum(checkpoint.read(name) for checkpoint in merged) / 3
        torch.testing.assert_close(mean.read(name), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(dora.read(name), merged[0].read(name), rtol=0, atol=1e-6)
    average.verify()
    ledger.verify()
    assert ledger.manifest.adapters == {"plain"}


def test_one_sentence_at_add_and_memory_of_one_module(workshop: Workshop) -> None:
    base = workshop.base(llama)
    theta = open_checkpoint(base)
    adapter = workshop.adapter(base, use_dora=True, **MODULES)
    vector = make_task_vector(BaseModel.examine(theta), theta, open_expert(adapter))
    assert vector.notes == (f"{adapter}: PEFT merges it into the base, one module at a time (use_dora)",)
    assert vector.copies == theta.copies + COPIES


def test_an_expert_to_run_has_the_merged_weights(workshop: Workshop) -> None:
    base = workshop.base(llama)
    adapter = workshop.adapter(base, kind="LOKR", **MODULES)
    theta = open_checkpoint(base)
    bound = BoundAdapter(open_adapter(adapter), BaseModel.examine(theta), theta)
    merged = open_checkpoint(workshop.merged(base, adapter))
    for name, weight in read_weights(theta, bound).items():
        assert torch.equal(weight, merged.read(name))


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_are_refused_by_name(workshop: Workshop, kind: str) -> None:
    adapter = workshop.adapter(workshop.base(llama), **MODULES)
    edit_config(adapter, peft_type=kind)
    with pytest.raises(MergestreamError, match=f"peft_type={kind} trains tokens or prefixes .* serve it with PEFT"):
        open_adapter(adapter)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"peft_type": kind}, f"peft_type={kind} changes the weights by the input, so it") for kind in BY_INPUT),
        *(({"peft_type": kind}, f"peft_type={kind} cannot be merged one by one; merge") for kind in WHOLE_MODEL),
        ({"peft_type": "NEXT_YEAR"}, "the installed PEFT does not know peft_type=NEXT_YEAR; update it"),
        ({"peft_type": "LOHA", "r": 1 << 20}, "r=1048576 is too large"),
        ({"peft_type": "LOHA", "magic": [1]}, "magic=.* does not know it"),
        ({"peft_type": "LOHA", "rank_pattern": {"(": 2}}, "an expression in rank_pattern cannot be honoured"),
    ],
)
def test_what_peft_cannot_merge_is_refused(workshop: Workshop, fields: Any, message: str) -> None:
    adapter = workshop.adapter(workshop.base(llama), kind="LOHA", **MODULES)
    edit_config(adapter, **fields)
    with pytest.raises(MergestreamError, match=f"adapter_config.json: .*{message}"):
        open_adapter(adapter)


def test_an_adapter_that_does_not_fit_is_refused(workshop: Workshop) -> None:
    base = workshop.base(llama)
    adapter = workshop.adapter(base, kind="LOHA", **MODULES)
    file = adapter / "adapter_model.safetensors"
    state = load_file(file)
    key = "base_model.model.model.layers.0.self_attn.q_proj.hada_w1_a"
    save_file({name: tensor for name, tensor in state.items() if name != key}, file)
    with pytest.raises(MergestreamError, match=r"PEFT cannot merge its change of model\.layers\.0\..*q_proj .*missing"):
        changes(base, adapter)
    save_file({**state, key: torch.ones(3, 3)}, file)
    with pytest.raises(MergestreamError, match=r"PEFT cannot merge .*size mismatch"):
        changes(base, adapter)
    with pytest.raises(
        MergestreamError, match=r"changes model\.layers\.0.*, which the base does not have: it was made"
    ):
        changes(workshop.base(gpt2, "gpt2"), adapter)
    save_file({**state, key: state[key] * float("nan")}, file)
    with pytest.raises(MergestreamError, match="NaN"):
        changes(base, adapter)


def test_tokens_outside_the_embedding_are_refused(workshop: Workshop) -> None:
    base = workshop.base(llama)
    adapter = workshop.adapter(base, trainable_token_indices=[1, 3], **MODULES)
    edit_config(adapter, trainable_token_indices={"embed_tokens": [1, 4000]})
    with pytest.raises(MergestreamError, match=r"trainable_token_indices are not the rows of model\.embed_tokens"):
        changes(base, adapter)


def test_without_peft(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    base = workshop.base(llama)
    adapter = workshop.adapter(base, use_dora=True, **MODULES)
    plain = workshop.adapter(base, "plain", **MODULES)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        MergestreamError, match=r"to merge use_dora, mergestream needs PEFT: pip install 'mergestream\["
    ):
        open_adapter(adapter)
    assert changes(base, plain)
