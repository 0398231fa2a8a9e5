"""One tiny model of each family goes in, comes out of a store, and does what it did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mergestream import EMA, LAWA, OPCM, TIES, Average, Ledger, MagMax, Store, TaskArithmetic
from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from mergestream.methods.base import Method
from mergestream.testing import merged_in_memory
from tests import workshop
from tests.conftest import RunCommand

transformers = pytest.importorskip("transformers")

TEXT = {**workshop.TEXT, "num_key_value_heads": 1, "pad_token_id": 2}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 8, "patch_size": 4}
IMAGE = torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8)
IDS = torch.tensor([[3, 7, 5, 9]])
Model = Callable[[], Any]


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))


def t5() -> Any:
    config = transformers.T5Config(d_model=16, d_ff=24, num_layers=2, num_heads=2, d_kv=8, vocab_size=40)
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> Any:
    sizes = {f"{part}_{key}": 2 for part in ("encoder", "decoder") for key in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16, "vocab_size": 40, "num_mel_bins": 4}
    tokens = {"pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = transformers.WhisperConfig(
        **sizes, **tokens, max_source_positions=8, max_target_positions=8, suppress_tokens=None
    )
    return transformers.WhisperForConditionalGeneration(config)


def wav2vec2() -> Any:
    config = transformers.Wav2Vec2Config(
        **{**VISION, "vocab_size": 40},
        conv_dim=(8, 8),
        conv_stride=(4, 4),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    return transformers.Wav2Vec2ForCTC(config)


def llava() -> Any:
    text, vision = transformers.LlamaConfig(**TEXT), transformers.CLIPVisionConfig(**VISION)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=39)
    return transformers.LlavaForConditionalGeneration(config)


def clip() -> Any:
    text = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8))


def mamba() -> Any:
    config = transformers.MambaConfig(hidden_size=16, state_size=8, num_hidden_layers=2, vocab_size=40)
    return transformers.MambaForCausalLM(config)


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**TEXT, num_local_experts=4))


def qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        **TEXT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=8
    )
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(**TEXT, num_local_experts=4, head_dim=8, num_experts_per_tok=2)
    return transformers.GptOssForCausalLM(config)


LLAVA_IDS = torch.tensor([[3, *[39] * 4, 7]])
INPUTS: dict[Model, dict[str, Tensor]] = {
    llama: {"input_ids": IDS},
    t5: {"input_ids": IDS, "decoder_input_ids": IDS},
    whisper: {"input_features": torch.linspace(-1, 1, 64).reshape(1, 4, 16), "decoder_input_ids": IDS},
    wav2vec2: {"input_values": torch.linspace(-1, 1, 400).reshape(1, 400)},
    llava: {"input_ids": LLAVA_IDS, "pixel_values": IMAGE},
    clip: {"input_ids": IDS, "pixel_values": IMAGE},
    mamba: {"input_ids": IDS},
    mixtral: {"input_ids": IDS},
    qwen3_moe: {"input_ids": IDS},
    gpt_oss: {"input_ids": IDS},
}
STACKED = [mixtral, qwen3_moe, gpt_oss]


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory, save_original_format=False)
    return directory


def fine_tuned(base: Any, make: Model, seed: int) -> Any:
    """The base with a change of rank one in every matrix, and any change elsewhere."""
    model, scale = make(), 0.02 * 3**seed
    model.load_state_dict(base.state_dict())
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            stacked = weight.ndim == 3 and "experts" in name
            matrix = weight if stacked else weight.flatten(1) if weight.ndim > 1 else weight.reshape(-1, 1)
            left, right = torch.randn(*matrix.shape[:-1], 1), torch.randn(*matrix.shape[:-2], 1, matrix.shape[-1])
            weight += (scale * left @ right / matrix.shape[-1] ** 0.5).reshape(weight.shape)
    return model


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        output = model.eval()(**inputs)
    found: Tensor = output.logits_per_image if "logits_per_image" in output else output.logits
    return found


@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
def test_in_and_out(tmp_path: Path, make: Model) -> None:
    torch.manual_seed(0)
    base = make()
    experts = {f"expert-{seed}": fine_tuned(base, make, seed) for seed in range(2)}
    place = save(base, tmp_path / "base")
    ledger = Store.create(tmp_path / "ledger", place, Ledger(entries="float32"))
    average = Store.create(tmp_path / "average", place, Average())
    for name, expert in experts.items():
        save(expert, tmp_path / name)
        ledger.add(tmp_path / name)
        average.add(tmp_path / name)

    again = ledger.export(tmp_path / "again", readout="expert:expert-1")
    reloaded, loading = type(base).from_pretrained(again, output_loading_info=True)
    assert not any(loading.values())
    before, expected = logits(base, INPUTS[make]), logits(experts["expert-1"], INPUTS[make])
    error = (logits(reloaded, INPUTS[make]) - expected).norm() / (expected - before).norm()
    assert float(error) < 1e-4

    mean, opened = open_checkpoint(average.export(tmp_path / "mean")), [open_checkpoint(tmp_path / n) for n in experts]
    for name, info in mean.tensors.items():
        if info.is_float:
            exact = (opened[0].read(name).double() + opened[1].read(name).double()) / 2
            torch.testing.assert_close(mean.read(name).double(), exact, rtol=2**-22, atol=2**-24)


@pytest.mark.parametrize("make", STACKED, ids=lambda make: make.__name__)
def test_stacks_of_experts_are_counted_as_matrices(tmp_path: Path, make: Model, mergestream: RunCommand) -> None:
    place = save(make(), tmp_path / "base")
    model = BaseModel.examine(open_checkpoint(place), measure=False)
    linear = {name: tensor.shape for name, tensor in model.tensors.items() if tensor.role == "linear"}
    stacks = [shape for shape in linear.values() if len(shape) == 3]
    assert len(stacks) == 4  # gate and up, and down, in two layers
    assert model.matrices == len(linear) - 4 + 4 * 4
    assert len(model.input_first) == (4 if make is gpt_oss else 0)
    created = mergestream("init", tmp_path / "store", "--base", place)
    assert f"{len(linear)} linear ({model.matrices} matrices)" in created.out


BY_MATRIX = [OPCM(), OPCM(projection="paper"), Ledger(budget=4, entries="float32", svd="exact")]
BY_ELEMENT = [Average(), TaskArithmetic(), EMA(), LAWA(), MagMax(), TIES(), TIES(mode="streaming")]


@pytest.mark.parametrize("method", [*BY_MATRIX, *BY_ELEMENT], ids=str)
def test_a_stack_is_merged_like_its_matrices(method: Method) -> None:
    torch.manual_seed(0)
    base = qwen3_moe().double()
    models = [base, *(fine_tuned(base, lambda: qwen3_moe().double(), seed) for seed in range(3))]
    stacks, single = [dict(model.state_dict()) for model in models], []
    for model in stacks:
        single.append({name: tensor for name, tensor in model.items() if tensor.ndim < 3})
        for name in model.keys() - single[-1].keys():
            single[-1] |= {f"{name}.{number}.weight": matrix for number, matrix in enumerate(model[name])}
    found, expected = (merged_in_memory(method, models[0], models[1:]) for models in (stacks, single))
    for name, tensor in found.items():
        if tensor.ndim == 3:
            matrices = [expected[f"{name}.{number}.weight"] for number in range(len(tensor))]
            torch.testing.assert_close(tensor, torch.stack(matrices), rtol=1e-7, atol=1e-9)
