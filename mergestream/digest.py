"""Content digests: the same tensors give the same digest, however they are sharded or stored.

XXH3-128 runs at memory speed, so that every tensor that passes through is digested for free. It
detects corruption, duplicates and mistaken files; it is no defence against a forger.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from torch import Tensor


def tensor_digest(tensor: Tensor) -> str:
    """Digest of a CPU tensor's dtype, shape and bytes."""
    import torch

    data = tensor.detach().contiguous()
    hasher = xxhash.xxh3_128(f"{data.dtype}{tuple(data.shape)}".encode())
    hasher.update(memoryview(data.reshape(-1).view(torch.uint8).numpy()))
    return hasher.hexdigest()


def combined_digest(digests: Mapping[str, str]) -> str:
    """Digest of a whole set of named tensors, from the digests of the tensors."""
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        hasher.update(f"{name}\0{digests[name]}\n".encode())
    return hasher.hexdigest()


def text_digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
