"""Checks of entries of a ledger and of moments of inputs when they are read: a store may come from somebody else."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mergestream.algebra.pieces import LARGEST_NORM

ROUNDING = 1e-4
"""Of sums of squares, which are taken of float32 numbers"""
UNEVEN = 1 / 64
"""How far inner products of directions may be from 0 and 1: twice what rounding to bfloat16 can do"""


def find_fault(slots: Mapping[str, Tensor], *, thorough: bool = False) -> str | None:
    """What is wrong with an entry of one tensor, or with those of its slots that were read; None where nothing is.

    All numbers are finite, as `CheckedTensors` makes sure. Directions must have norm 1; with ``thorough`` they must be
    orthogonal to each other, too. A moment has eigenvalues as ``sigma``, eigenvectors as ``right``, and a ``rest``.
    """
    if "sigma" not in slots:
        return None
    sigma = slots["sigma"].numpy()  # with less overhead than torch: there are many small tensors
    if not ((sigma >= 0) & (sigma <= LARGEST_NORM)).all():
        return f"its singular values must be between 0 and {LARGEST_NORM:g}"
    if (sigma[..., 1:] > sigma[..., :-1] * (1 + ROUNDING)).any():
        return "its singular values must be in descending order"
    for slot in ("norm2", "rest"):
        if slot in slots and not ((slots[slot] >= 0) & (slots[slot] <= LARGEST_NORM**2)).all():
            return f"its {slot} must be between 0 and {LARGEST_NORM**2:g}"
    if "norm2" in slots and bool((slots["sigma"].square().sum(-1) > slots["norm2"] * (1 + ROUNDING)).any()):
        return "its singular values have a larger norm than the whole"
    for side in ("left", "right"):
        if side in slots:
            rows = slots[side]
            used = sigma[..., : rows.shape[-2]] > 0
            if not (_are_normal(rows, used) and (not thorough or _are_orthogonal(rows, used))):
                return f"its {side} directions must be orthonormal"
    return None


def _are_normal(rows: Tensor, used: np.ndarray) -> bool:
    """Whether all rows have the norm 1; those beyond the rank, where σ = 0, may be shorter."""
    lengths = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32).numpy()
    return bool(((lengths <= 1 + UNEVEN / 2) & (~used | (lengths >= 1 - UNEVEN / 2))).all())


def _are_orthogonal(rows: Tensor, used: np.ndarray) -> bool:
    wide = rows.to(torch.float32) * torch.from_numpy(used[..., None])
    inner = wide @ wide.mT
    inner.diagonal(dim1=-2, dim2=-1).zero_()
    return bool((inner.abs() <= UNEVEN).all())
