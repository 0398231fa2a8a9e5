"""Products of matrices, each by the library that is fastest at it."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor
from torch.nn.functional import linear

_LEAST_WORK = 1 << 24
"""Multiplications; for fewer, copying to oneDNN and back takes longer than it saves"""
_SLAB = 1 << 22
"""Elements of the rows that are multiplied at a time: 16 MB, which malloc reuses"""


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """A·B. Large float32 products take oneDNN, which uses all of an AMD processor, where MKL uses half."""
    is_large = a.shape[0] * a.shape[1] * b.shape[1] >= _LEAST_WORK
    if not is_large or a.dtype != torch.float32 or a.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return a @ b
    right, rows = b.T.to_mkldnn(), max(1, _SLAB // max(a.shape[1], b.shape[1]))
    product = a.new_empty(a.shape[0], b.shape[1])
    for start in range(0, len(a), rows):
        product[start : start + rows] = linear(a[start : start + rows].to_mkldnn(), right).to_dense()
    return product


def gram(matrix: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """SᵀS. NumPy sees that both factors are one matrix, and multiplies for one triangle only (syrk)."""
    wide = matrix.to(dtype)
    if wide.device.type != "cpu":
        return wide.T @ wide
    result = wide.new_empty(wide.shape[1], wide.shape[1])  # torch's memory begins at a cache line, NumPy's anywhere
    array = wide.numpy()
    numpy.matmul(array.T, array, out=result.numpy())
    return result
