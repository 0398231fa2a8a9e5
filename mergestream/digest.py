"""Content digests: the same tensors give the same digest, however they are sharded or stored.

XXH3-128 runs at memory speed, so digesting every tensor costs almost nothing. It detects corruption,
duplicates and wrong files. It does not protect against forgery.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TensorHasher:
    """Digest of a tensor's dtype, shape and bytes, updated with contiguous CPU pieces in order."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self._hasher = xxhash.xxh3_128(f"{dtype}{tuple(shape)}".encode())
        self.hexdigest = self._hasher.hexdigest

    def update(self, piece: Tensor) -> None:
        import torch

        self._hasher.update(piece.reshape(-1).view(torch.uint8).numpy().data)


def tensor_digest(tensor: Tensor) -> str:
    """Digest of a whole CPU tensor."""
    hasher = TensorHasher(tensor.dtype, tensor.shape)
    hasher.update(tensor.detach().contiguous())
    return hasher.hexdigest()


def combined_digest(digests: Mapping[str, str]) -> str:
    """Digest of a set of named tensors, computed from their digests."""
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        hasher.update(f"{name}\0{digests[name]}\n".encode())
    return hasher.hexdigest()


def text_digest(text: str) -> str:
    """Digest of a string."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def json_digest(data: Any) -> str:
    """Digest of JSON data; the order of keys does not matter."""
    return text_digest(json.dumps(data, sort_keys=True))
