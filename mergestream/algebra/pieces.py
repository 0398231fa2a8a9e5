"""Tensors go by in pieces.

A piece is small enough to stay in the processor's cache between reading, subtracting, absorbing and writing, and large
enough that the calls from Python do not count. It is also below the size up to which the engine has malloc
keep what is freed: fresh memory for every piece made the same arithmetic ten times slower (docs/notes/performance.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_RUN = 1024
_TINY = 1e-24
PIECE = 1 << 18
"""Elements in a piece."""
ALIGNMENT = 64
"""Bytes of a cache line: where torch lets its arrays start, and we let a file's."""
Elements = Callable[[int, int], "Tensor"]
"""Any range of a flattened tensor, by its start and its end."""


def squared_norm(x: Tensor) -> float:
    """‖x‖², to 1e-8 or better.

    Runs of 1024 float32 squares are summed in float32, as dot products, and the runs in float64: six times
    as fast as float64 throughout. Squares that float32 cannot hold take the slow way.
    """
    import numpy as np
    import torch

    if x.dtype == torch.float32 and x.numel() % _RUN == 0 and x.is_cpu and x.is_contiguous():
        runs = x.numpy().reshape(-1, _RUN)
        total = float(np.matmul(runs[:, None], runs[:, :, None]).sum(dtype=np.float64))
        if _TINY < total < math.inf:
            return total
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
