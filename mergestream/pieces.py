"""Tensors go by in pieces.

A piece is small enough to stay in the processor's cache between reading, subtracting, absorbing and
writing, and below the size from which on every allocation is a fresh mapping: that made the same
arithmetic ten times slower (docs/performance.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 1 << 17
"""Elements in a piece."""


def squared_norm(x: Tensor) -> float:
    """‖x‖², summed in float64."""
    import torch

    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
