"""Tiny bases of several families with tokenizers, experts of them, and an independent formula of the moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from mergestream.engine import LocalEngine
from mergestream.experts import make_task_vector, open_expert
from mergestream.inputs.reading import Inputs, Sample, read_inputs
from mergestream.inputs.statistics import InputStatistics, measure_statistics
from mergestream.progress import NoProgress
from tests import speaking
from tests.workshop import Workshop, peft, transformers, workshop  # noqa: F401

TEXTS = [
    "the cat sat on a mat",
    "a dog ran off",
    "the dog and the cat",
    "on a mat sat the cat and the dog",
    "off",
    "a mat ran",
]
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def bert() -> Any:
    config = transformers.BertConfig(**SMALL, vocab_size=13, max_position_embeddings=16)
    return transformers.BertForSequenceClassification(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        **SMALL, vocab_size=13, num_key_value_heads=1, bos_token_id=1, eos_token_id=1, max_position_embeddings=64
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    return speaking.gpt2(rows=13)


def t5() -> Any:
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 13}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    return transformers.T5ForConditionalGeneration(config)


def gemma() -> Any:
    config = transformers.Gemma3TextConfig(
        **SMALL, vocab_size=13, num_key_value_heads=1, head_dim=8, bos_token_id=1, eos_token_id=1
    )
    return transformers.Gemma3ForCausalLM(config)


def vit() -> Any:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, image_size=8, patch_size=4))


def clip_vision() -> Any:
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SMALL, image_size=8, patch_size=4))


def save_with_companions(model: Any, place: Path) -> Path:
    """Save a model in float64, with a tokenizer or an image processor."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
    model.double().save_pretrained(place)
    if hasattr(model.config, "image_size"):
        transformers.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(place)
    else:
        tokens = speaking.tokenizer([*speaking.WORDS, "<pad>"])
        tokens.pad_token = "<pad>"
        tokens.save_pretrained(place)
    return place


def expert_of(base: Path, place: Path, seed: int = 2) -> Path:
    """A copy of the base with all weights moved."""
    torch.manual_seed(seed)
    model = speaking.auto(base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(place)
    for companion in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        if (base / companion).exists():
            (place / companion).write_bytes((base / companion).read_bytes())
    return place


def measure(
    base: Any,
    expert: Any,
    samples: Sequence[Sample],
    how: Inputs | None = None,
    *,
    kept: int = 1000,
    ignore: Sequence[str] = (),
    **options: Any,
) -> InputStatistics:
    """The statistics of an expert; by default with all directions, in float64."""
    with open_checkpoint(base) as opened:
        model = BaseModel.examine(opened, measure=False)
        found = open_expert(expert)
        vector = make_task_vector(model, opened, found, partial=True, ignore=ignore)
        directions = {name: kept for name in model.merged if model.tensors[name].role == "linear"}
        options = {"dtype": torch.float64, "engine": LocalEngine(), "progress": NoProgress(), **options}
        return measure_statistics(vector, found, directions, samples, how or Inputs([]), **options)


def expected_moments(
    model: Any, run: Callable[[Any], Any], masks: Mapping[int, Tensor] | None = None
) -> dict[str, Tensor]:
    """The mean of x xᵀ of every linear layer, by a batch with padding; ``masks`` are by the number of positions."""
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, given, output: seen.setdefault(name, []).append(given[0].detach().double())

    for path, module in model.named_modules():
        if type(module).__name__ in ("Linear", "Conv1D"):
            module.register_forward_hook(keep(f"{path}.weight"))
    with torch.no_grad():
        run(model)
    found = {}
    for name, inputs in seen.items():
        rows = [x[masks[x.shape[1]].bool()] if masks and x.ndim == 3 else x.flatten(0, -2) for x in inputs]
        tokens = torch.cat(rows)
        found[name] = torch.einsum("ti,tj->ij", tokens, tokens) / len(tokens)
    return found


def assert_moments(
    found: InputStatistics, expected: Mapping[str, Tensor], leave: Sequence[str] = (), base: Path | None = None
) -> None:
    """Every linear layer has the moment of the formula, under the name that is stored in the base."""
    if base is not None:
        stored = BaseModel.examine(open_checkpoint(base), measure=False).spellings
        expected = {stored.get(name, name): matrix for name, matrix in expected.items()}
    assert found.layers.shared.keys() == expected.keys() - set(leave)
    for name, first in found.layers.shared.items():
        matrix = found.layers.moments[first].apply(torch.eye(len(expected[name])))
        assert torch.allclose(matrix, expected[name], rtol=1e-5, atol=1e-6), name


@pytest.fixture
def texts() -> list[Sample]:
    return read_inputs(TEXTS, progress=NoProgress())
