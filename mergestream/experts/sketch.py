"""Count sketches of task vectors: cosines between all experts without keeping their weights.

Every element of Δ is added, with a pseudo-random sign, to one of ``WIDTH`` buckets. The cosine of two sketches is an
unbiased estimate of the cosine c of the task vectors, with a standard deviation of about (1 − c²)/√WIDTH ≤ 0.002.

The sketch of a small model is folded: parts of the buckets are added up, until it has a hundredth of the model's
parameters. Folding commutes with sketching, so sketches of any two widths can be compared.

Buckets are not hashed per element, because random access is slow. All tensors are laid out in one line, and the line is
wound around the buckets in laps; each lap starts at a random bucket. Elements of one lap never collide, so the sketch
of a model with at most ``WIDTH`` elements is exact. Elements of different laps collide with probability 1/WIDTH, as
usual. The signs of a chunk of the line come from a table at a random offset, times a random sign of the chunk. Adding a
chunk is one multiply-add over contiguous memory, a third of a nanosecond per element.

If a model has more than ``SAMPLED`` chunks of linear weights, about ``SAMPLED`` random ones are sketched, the same for
every expert and with weights that keep the estimate unbiased. So task vectors in factors need not be multiplied out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from mergestream.algebra.pieces import Elements, is_finite
from mergestream.engine import Collector

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mergestream.base.model import BaseTensor

WIDTH = 1 << 18
"""Buckets before folding: 512 KiB in float16"""
MIN_WIDTH = 1 << 12
"""Buckets that are kept at least: 8 KiB, about the size of an expert's record"""
PARAMETERS_PER_BUCKET = 100
"""A sketch is at most a hundredth of a 16-bit model"""
CHUNK = 1 << 17
"""Consecutive elements that share one draw of signs and sampling; half a lap"""
SAMPLED = 1 << 12
"""Chunks of linear weights that are sketched on average if the model has more: 2²⁹ elements"""
FORMAT = "2"
"""Increase it with any change of the numbers above or of the hashes."""
READABLE = ("1", FORMAT)
"""Sketches of format 1 are not folded."""
_BLOCK = 1 << 14
"""Buckets that are multiplied at a time"""


def width_for(parameters: int) -> int:
    """The number of buckets for a model with so many parameters, a power of two."""
    return max(MIN_WIDTH, min(WIDTH, 1 << (max(parameters // PARAMETERS_PER_BUCKET, 1).bit_length() - 1)))


def cosine_error(width: int) -> float:
    """The standard error of the cosine of two unrelated task vectors; it is less for similar ones."""
    return 1 / math.sqrt(width)


class Sketch(Collector):
    """The sketch of a task vector. Threads may add tensors in any order.

    Each summand is rounded to a grid of 2⁻⁴⁴ times the norm of the base, on which float64 sums are exact and
    therefore independent of the order.
    """

    def __init__(self, tensors: Mapping[str, BaseTensor]) -> None:
        """``tensors`` are those of the base, always in the same order."""
        import torch

        self._tensors = tensors
        self._starts: dict[str, int] = {}
        end = 0
        for name, tensor in tensors.items():
            self._starts[name] = end
            end += tensor.numel
        linear = sum(tensor.numel for tensor in tensors.values() if tensor.role == "linear")
        self._share = min(1.0, SAMPLED * CHUNK / max(linear, 1))
        norm = math.sqrt(math.fsum(tensor.norm**2 for tensor in tensors.values()))
        self._grid = 1.5 * 2.0 ** (52 - 44) * (2.0 ** math.ceil(math.log2(norm)) if norm else 1.0)
        self._buckets = torch.zeros(WIDTH, dtype=torch.float64)
        self._width = width_for(end)
        self._lock = Lock()

    def tensor(self, name: str) -> TensorSketch:
        """An empty sketch of one tensor."""
        return TensorSketch(self._starts[name], self._tensors[name].numel, self.share(name))

    def share(self, name: str) -> float:
        """The share of a tensor that is sampled."""
        return self._share if self._tensors[name].role == "linear" else 1.0

    def add(self, tensor: TensorSketch) -> None:
        """Add the sketch of one tensor."""
        if not is_finite(tensor.buckets):
            raise OverflowError("a sum is too large for float32")
        # Adding and subtracting a large number rounds to the grid.
        rounded = tensor.buckets.double().add_(self._grid).sub_(self._grid)
        with self._lock:
            for here, there in _wrapped(tensor.first, len(rounded)):
                self._buckets[there] += rounded[here]

    def add_tensor(self, name: str, delta: Tensor) -> None:
        """Add a whole tensor."""
        tensor = self.tensor(name)
        tensor.update(0, delta)
        self.add(tensor)

    def add_elements(self, name: str, elements: Elements) -> None:
        """Add a tensor given by a function; only sampled elements are computed."""
        tensor = self.tensor(name)
        for start, stop in tensor.ranges():
            tensor.update(start, elements(start, stop))
        self.add(tensor)

    def collected(self) -> Tensor:
        found = self._buckets.clone()
        self._buckets.zero_()
        return found

    def collect(self, more: Tensor) -> None:
        self._buckets += more

    def __reduce__(self) -> tuple[Any, ...]:
        return Sketch, (self._tensors,)

    def values(self) -> Tensor:
        """The sketch to be stored: folded, in float16, scaled to a mean square of one."""
        import torch

        kept = torch.from_numpy(fold(self._buckets.numpy(), self._width))
        norm = torch.linalg.vector_norm(kept)
        return (kept * (math.sqrt(self._width) / norm) if norm else kept).to(torch.float16)


class TensorSketch:
    """The sketch of one tensor, fed with the pieces of its task vector in order.

    A tensor within one lap touches no more buckets than it has elements; only these are allocated.
    """

    def __init__(self, position: int, numel: int, share: float) -> None:
        import torch

        self._position, self._numel, self._share = position, numel, share
        one_lap = position // WIDTH == (position + max(numel, 1) - 1) // WIDTH
        self.first = _bucket(position) if one_lap else 0
        self.buckets = torch.zeros(numel if one_lap else WIDTH)

    def update(self, start: int, piece: Tensor) -> None:
        """Add the elements from ``start`` on; CPU, any floating-point type."""
        import torch

        flat, signs = piece.reshape(-1), _signs()
        for begin, end in self.ranges(start, start + flat.numel()):
            values = flat[begin - start : end - start].to(torch.float32)
            chunk, offset = divmod(self._position + begin, CHUNK)
            hashed = _hash_chunk(chunk)
            weight = hashed.sign / math.sqrt(self._share)
            place = (_bucket(self._position + begin) - self.first) % WIDTH
            for here, there in _wrapped(place, end - begin):
                first = hashed.table + offset + here.start
                self.buckets[there].addcmul_(values[here], signs[first : first + here.stop - here.start], value=weight)

    def ranges(self, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
        """The sampled ranges of elements, cut at the ends of chunks."""
        stop = self._numel if stop is None else stop
        sampled = []
        while start < stop:
            chunk, offset = divmod(self._position + start, CHUNK)
            end = min(start + CHUNK - offset, stop)
            if self._share == 1 or _hash_chunk(chunk).chance < self._share:
                sampled.append((start, end))
            start = end
        return sampled


class ChunkHash(NamedTuple):
    """Pseudo-random numbers of a chunk."""

    table: int
    """Where its signs begin in the table"""
    sign: int
    chance: float
    """Between 0 and 1; the chunk is sampled if it is below the share"""


def _hash_chunk(chunk: int) -> ChunkHash:
    bits = xxhash.xxh3_64_intdigest(f"chunk {chunk}".encode())
    return ChunkHash(bits % CHUNK, 1 - 2 * (bits >> 63), (bits >> 20) % 2**32 / 2**32)


def _bucket(position: int) -> int:
    """The bucket of an element, by its position in the line of all tensors."""
    lap, place = divmod(position, WIDTH)
    return (place + xxhash.xxh3_64_intdigest(f"lap {lap}".encode())) % WIDTH


@cache
def _signs() -> Tensor:
    """Two chunks of ±1, the same on every machine and in every version."""
    import numpy as np
    import torch

    stream = hashlib.shake_128(b"mergestream sketch").digest(2 * CHUNK // 8)
    bits = np.unpackbits(np.frombuffer(stream, np.uint8))
    return torch.from_numpy(1 - 2 * bits.astype(np.float32))


def _wrapped(start: int, count: int) -> list[tuple[slice, slice]]:
    """Wrap ``count`` buckets from ``start`` on around the end; pairs of slices of the elements and the buckets."""
    before_end = min(count, WIDTH - start)
    slices = [(slice(0, before_end), slice(start, start + before_end))]
    if before_end < count:
        slices.append((slice(before_end, count), slice(0, count - before_end)))
    return slices


def fold(buckets: np.ndarray, width: int) -> np.ndarray:
    """Fold a sketch to fewer buckets: add up its parts, each rotated by its own offset.

    The first part begins with the model's first element, so a model with at most ``width`` elements stays exact.
    """
    import numpy as np

    if len(buckets) == width:
        return buckets
    parts = np.roll(buckets, -_bucket(0)).reshape(-1, width)
    turns = (xxhash.xxh3_64_intdigest(f"fold {number}".encode()) % width for number in range(len(parts)))
    folded: np.ndarray = np.sum([np.roll(part, turn) for part, turn in zip(parts, turns, strict=True)], axis=0)
    return folded


def cosines(sketches: Sequence[np.ndarray | None]) -> list[list[float | None]]:
    """Estimate the cosines between all task vectors; None if one is unknown or zero.

    Sketches of different widths are folded to the smallest.
    """
    import numpy as np

    known = {number: sketch for number, sketch in enumerate(sketches) if sketch is not None and sketch.any()}
    found: list[list[float | None]] = [[None] * len(sketches) for _ in sketches]
    width = min(map(len, known.values()), default=0)
    alike = [sketch if len(sketch) == width else fold(sketch.astype(np.float32), width) for sketch in known.values()]
    products = np.zeros((len(known), len(known)))
    for start in range(0, width, _BLOCK):  # one product for all pairs is much faster than one per pair
        block = np.array([sketch[start : start + _BLOCK] for sketch in alike], dtype=np.float32)
        products += block @ block.T
    norms = np.sqrt(np.diag(products))
    values = np.clip(products / np.outer(norms, norms), -1, 1).tolist()
    for i, row in zip(known, values, strict=True):
        for j, value in zip(known, row, strict=True):
            found[i][j] = value
    return found
