"""The model of the suite: how to load it and compute features."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import normalize

INPUTS, WIDTH, FEATURES = 32, 256, 32


def network() -> torch.nn.Sequential:
    layers = (torch.nn.Linear(INPUTS, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, FEATURES))


def features(model: Path, inputs: torch.Tensor) -> torch.Tensor:
    loaded = network()
    loaded.load_state_dict(load_file(model / "model.safetensors"))
    with torch.no_grad():
        return normalize(loaded(inputs), dim=1)
