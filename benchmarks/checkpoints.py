"""Synthetic checkpoints with the shapes of real models and task vectors like those of fine-tuning.

    python -m benchmarks.checkpoints llama-1gb --experts 3

A base has Gaussian weights. The task vector of a matrix is Δ = U diag(σ) Vᵀ with orthonormal U and V and
σ_i ∝ i^-0.7 (half of the sum of the singular values lies in a seventh of them, and the rank is full); its
norm is 1 % of the weight's, as measured on fine-tuned encoders. U and V are Kronecker products of two small
random orthogonal matrices, which makes them dense and cheap: 2·m·n·(c+d) operations where n = c·d, instead
of the decomposition of an m×n matrix. Everything is seeded by the names of the model, the member and the
tensor, so every machine with the same torch makes the same files. Each tensor is made separately, and at most
one shard is in memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CACHE = Path(__file__).parents[1] / ".cache" / "benchmarks"
BASE_STD = 0.02
RELATIVE_NORM = 0.01
DECAY = 0.7


@dataclass(frozen=True)
class Shape:
    """A model's configuration, tensor shapes and dtype."""

    config: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    shard_bytes: int = 512 * 2**20


@dataclass(frozen=True)
class Family:
    """A base on disk and its experts."""

    model: str
    base: Path
    experts: tuple[Path, ...]


def clip_vision(hidden: int, layers: int, heads: int, patch: int, projection: int) -> Shape:
    """The vision tower of CLIP, with the names of the published checkpoints."""
    wide = 4 * hidden
    tensors: dict[str, tuple[int, ...]] = {
        "embeddings.class_embedding": (hidden,),
        "embeddings.patch_embedding.weight": (hidden, 3, patch, patch),
        "embeddings.position_embedding.weight": ((224 // patch) ** 2 + 1, hidden),
    }
    for norm in ("pre_layrnorm", "post_layernorm"):
        tensors |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
    for i in range(layers):
        layer = f"encoder.layers.{i}"
        for norm in ("layer_norm1", "layer_norm2"):
            tensors |= {f"{layer}.{norm}.weight": (hidden,), f"{layer}.{norm}.bias": (hidden,)}
        linear = {f"self_attn.{p}_proj": (hidden, hidden) for p in ("q", "k", "v", "out")}
        linear |= {"mlp.fc1": (wide, hidden), "mlp.fc2": (hidden, wide)}
        for name, shape in linear.items():
            tensors |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
    config = {
        "architectures": ["CLIPVisionModel"],
        "model_type": "clip_vision_model",
        "dtype": "float32",
        "hidden_act": "quick_gelu",
        "hidden_size": hidden,
        "image_size": 224,
        "intermediate_size": wide,
        "layer_norm_eps": 1e-05,
        "num_attention_heads": heads,
        "num_channels": 3,
        "num_hidden_layers": layers,
        "patch_size": patch,
        "projection_dim": projection,
    }
    return Shape(config, {f"vision_model.{name}": shape for name, shape in tensors.items()}, torch.float32)


def llama(
    layers: int,
    *,
    hidden: int = 2048,
    wide: int = 5632,
    heads: int = 32,
    key_value_heads: int = 4,
    vocabulary: int = 32000,
    dtype: torch.dtype = torch.bfloat16,
) -> Shape:
    """A Llama with tied embeddings. The largest tensor is the same for every depth."""
    narrow = hidden // heads * key_value_heads
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": (narrow, hidden),
            f"{layer}.self_attn.v_proj.weight": (narrow, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}.mlp.gate_proj.weight": (wide, hidden),
            f"{layer}.mlp.up_proj.weight": (wide, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, wide),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
    tensors["model.norm.weight"] = (hidden,)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "max_position_embeddings": 2048,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": key_value_heads,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
        "vocab_size": vocabulary,
    }
    return Shape(config, tensors, dtype)


MODELS = {
    "vit-b-32": clip_vision(hidden=768, layers=12, heads=12, patch=32, projection=512),
    "vit-l-14": clip_vision(hidden=1024, layers=24, heads=16, patch=14, projection=768),
    "llama-tiny": llama(2, hidden=512, wide=1408, heads=8, vocabulary=4000, dtype=torch.float32),
    "llama-1024": llama(4, hidden=1024, wide=2816, heads=16, vocabulary=8000),
    "llama-200mb": llama(1),
    "llama-1gb": llama(10),
    "llama-4gb": llama(44),
    # Two of Llama-7B's 32 layers. Sixteen times these 4096 rows are as many as its two embeddings have.
    "llama-7b-2-layers": llama(2, hidden=4096, wide=11008, key_value_heads=32, vocabulary=4096),
}


def family(model: str, experts: int, cache: Path = CACHE) -> Family:
    """Return the base and the first `experts` experts of `model`; make them if they do not exist."""
    members = ["base", *(f"expert-{i:02d}" for i in range(1, experts + 1))]
    base, *others = (member(model, name, cache) for name in members)
    return Family(model, base, tuple(others))


def member(model: str, name: str, cache: Path = CACHE) -> Path:
    """Return the directory of one checkpoint; it is renamed into place when it is complete."""
    directory = cache / model / name
    if directory.is_dir():
        return directory
    partial = directory.with_name(f".{name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write(MODELS[model], model, name, partial)
    partial.rename(directory)
    return directory


def task_vector(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a task vector: a power-law spectrum for a matrix, Gaussian for other tensors."""
    norm = RELATIVE_NORM * BASE_STD * math.sqrt(math.prod(shape))
    if len(shape) != 2:
        return torch.randn(shape, generator=generator) * (RELATIVE_NORM * BASE_STD)
    rows, columns = max(shape), min(shape)
    sigma = torch.arange(1, columns + 1, dtype=torch.float32) ** -DECAY
    sigma *= norm / sigma.norm()
    a, b = _factors(rows)
    left_a, left_b = _orthogonal(a, generator), _orthogonal(b, generator)
    picked = torch.randperm(rows, generator=generator)[:columns]
    left = left_a[:, None, picked // b] * left_b[None, :, picked % b]  # `columns` columns of the product
    c, d = _factors(columns)
    right_c, right_d = _orthogonal(c, generator), _orthogonal(d, generator)
    scaled = (left.reshape(rows, columns) * sigma).reshape(rows, c, d)
    delta = (right_c @ (scaled @ right_d.T)).reshape(rows, columns)
    return delta if shape == (rows, columns) else delta.T.contiguous()


def _factors(n: int) -> tuple[int, int]:
    small = next(i for i in range(math.isqrt(n), 0, -1) if n % i == 0)
    return small, n // small


def _orthogonal(n: int, generator: torch.Generator) -> Tensor:
    q: Tensor = torch.linalg.qr(torch.randn(n, n, generator=generator)).Q
    return q


def _seeded(*names: str) -> torch.Generator:
    digest = hashlib.sha256("/".join(names).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _tensor(model: str, member: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    value = torch.randn(shape, generator=_seeded(model, "base", name)) * BASE_STD
    if "norm" in name and name.endswith("weight"):
        value += 1
    if member != "base":
        value += task_vector(shape, _seeded(model, member, name))
    return value.to(dtype)


def _write(shape: Shape, model: str, member: str, directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(shape.config, indent=2) + "\n")
    shards: list[list[str]] = [[]]
    size, total = 0, 0
    for name, dimensions in shape.tensors.items():
        nbytes = math.prod(dimensions) * shape.dtype.itemsize
        if shards[-1] and size + nbytes > shape.shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + nbytes, total + nbytes
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        weight_map |= dict.fromkeys(names, file)
        tensors = {n: _tensor(model, member, n, shape.tensors[n], shape.dtype) for n in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=CACHE)
    arguments = parser.parse_args()
    made = family(arguments.model, arguments.experts, arguments.cache)
    for path in (made.base, *made.experts):
        print(path)


if __name__ == "__main__":
    main()
