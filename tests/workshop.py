"""Tiny models of three shapes, and adapters for them made by PEFT itself."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mergestream.algebra.lowrank import dense
from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from mergestream.checkpoints.location import locate
from mergestream.experts.adapters import adapter as adapters
from mergestream.experts.adapters.adapter import Adapter, BoundAdapter

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
VISION = {**TEXT, "image_size": 8, "patch_size": 4}
del VISION["vocab_size"]


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=1, **options))


def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=8, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def clip() -> Any:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=8)
    return transformers.CLIPModel(config)


def clip_vision() -> Any:
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION))


@dataclass
class Workshop:
    """Makes base models and adapters in a temporary directory."""

    directory: Path

    def base(self, make: Callable[..., Any], name: str = "base", **options: Any) -> Path:
        torch.manual_seed(0)
        make(**options).double().save_pretrained(self.directory / name)
        return self.directory / name

    def load(self, base: Path) -> Any:
        architecture = json.loads((base / "config.json").read_text())["architectures"][0]
        return getattr(transformers, architecture).from_pretrained(base, dtype="auto")

    def adapter(
        self, base: Path, name: str = "adapter", seed: int = 1, safe: bool = True, kind: str = "LORA", **fields: Any
    ) -> Path:
        """Save an adapter with random factors and other random changes; their scale depends on the seed."""
        torch.manual_seed(seed)
        scale = (0.1, 0.3, 0.04, 0.4)[seed % 4]
        if kind == "LORA":
            fields.setdefault("init_lora_weights", False)
        config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind](**fields)
        model = peft.get_peft_model(self.load(base), config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += scale * torch.randn_like(parameter)
        model.save_pretrained(self.directory / name, safe_serialization=safe)
        return self.directory / name

    def merged(self, base: Path, adapter: Path, name: str = "merged") -> Path:
        """What PEFT makes of base and adapter, as a checkpoint."""
        model = peft.PeftModel.from_pretrained(self.load(base), adapter)
        model.merge_and_unload().save_pretrained(self.directory / name)
        return self.directory / name


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def edit_config(adapter: Path, **fields: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def open_adapter(directory: Path) -> Adapter:
    return adapters.open_adapter(locate(directory))


def bind(adapter: Path, base: Path) -> BoundAdapter:
    return BoundAdapter(open_adapter(adapter), BaseModel.examine(open_checkpoint(base), measure=False))


def task_vector(bound: BoundAdapter, base: Path) -> dict[str, Tensor]:
    """Ours, dense in float64, for every tensor of the base."""
    theta = open_checkpoint(base)
    vector = {}
    for name in theta.tensors:
        if name in bound.whole:
            vector[name] = bound.read(name).double() - theta.read(name)
        else:
            vector[name] = dense(bound.delta(name, torch.float64))
    return vector


def assert_equals_peft(workshop: Workshop, base: Path, adapter: Path) -> BoundAdapter:
    bound = bind(adapter, base)
    ours, theta = task_vector(bound, base), open_checkpoint(base)
    merged = open_checkpoint(workshop.merged(base, adapter))
    assert merged.tensors.keys() == theta.tensors.keys()
    moved = set()
    for name in theta.tensors:
        theirs = merged.read(name) - theta.read(name)
        largest = float(max(theirs.abs().max(), theta.read(name).abs().max()))
        assert float((ours[name] - theirs).abs().max()) <= 1e-14 * largest, name
        if theirs.any():
            moved.add(name)
    assert moved
    assert moved == {name for name, delta in ours.items() if delta.any()}
    return bound
