"""Random choices by position: the same on every machine and device, for pieces of any size.

Philox makes its numbers of a key and a counter, so that those at any place can be had without those before it. NumPy
promises that its stream stays what it is, which torch does not of its generators.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BLOCK = 8
"""32-bit numbers per count of Philox"""


def chosen(key: int, share: float, start: int, count: int) -> Tensor:
    """Which of ``count`` elements from ``start`` on belong to a random ``share`` of all; ``key`` has 128 bits."""
    first, skipped = divmod(start, _BLOCK)
    stream = np.random.Philox(key=key).advance(first)
    numbers = stream.random_raw((skipped + count + 1) // 2).astype("<u8", copy=False).view("<u4")
    return torch.from_numpy(numbers[skipped : skipped + count] < round(share * 2**32))
