"""Small adapters for the toy base of tests/conftest.py, made without PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MODULES = {"layers.0.q": (8, 8), "layers.0.up": (16, 8), "layers.0.down": (8, 16)}


def handmade_adapter(directory: Path, seed: int, rank: int = 1, modules: Any = MODULES, **fields: Any) -> Path:
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    scale = (0.1, 0.3, 0.04, 0.4)[seed % 4]
    tensors = {}
    for module, (out, into) in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, into, generator=generator)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * scale
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": "toys/base", **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
