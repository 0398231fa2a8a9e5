"""Small models with everything that a method meets: matrices of all forms, vectors, integers."""

from __future__ import annotations

import torch
from torch import Tensor

SHAPES = {
    "a.weight": (40, 24),
    "a.bias": (40,),
    "b.weight": (24, 40),
    "norm.weight": (24,),
    "embed.weight": (50, 24),
    "conv.weight": (8, 3, 3, 3),
}


def make_models(count: int = 4, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[dict[str, Tensor]]:
    """A base and ``count`` experts whose task vectors have decaying spectra, as real ones do."""
    generator = torch.Generator().manual_seed(seed)

    def noise(shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) != 2:
            return x
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        return (u * torch.arange(1, len(s) + 1).pow(-0.7)) @ vh * 3

    base = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    models = [base] + [{name: base[name] + 0.05 * noise(shape) for name, shape in SHAPES.items()} for _ in range(count)]
    return [{name: x.to(dtype) for name, x in model.items()} for model in models]
