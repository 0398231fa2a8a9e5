"""A small sketch of each task vector, so that cosines to all past experts are known without keeping them.

A count sketch: every element of Δ is added, with a pseudo-random sign, to one of ``WIDTH`` buckets. The cosine of
two sketches estimates the cosine c of the task vectors without bias, with a standard deviation of about
(1 − c²)/√WIDTH ≤ 0.002; an error of 0.01 is five of these.

The buckets are not drawn element by element, which would make every element a random access. All tensors of the
model are laid out one after another, and this line is wound around the buckets, each lap from a random bucket on.
Elements of one lap never meet, so that the sketch of a model with no more elements than buckets is exact, and those
of different laps meet with probability 1/WIDTH, as in the textbook. The signs of a chunk of the line are read from a
table from a random place on, times a random sign of the chunk's own. Adding a chunk thus is one multiply-add over
contiguous memory, a third of a nanosecond an element.

In a model with more than ``SAMPLED`` chunks of linear weights, a random ``SAMPLED`` of these chunks are sketched, the
same ones for every expert and weighted so that there is still no bias: thousands of chunks tell the cosine as well as
all of them, and task vectors in factors need not be multiplied out as a whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from mergestream.algebra.pieces import Elements, is_finite

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mergestream.base.model import BaseTensor

WIDTH = 1 << 18
"""Buckets: 512 KiB in float16."""
CHUNK = 1 << 17
"""Consecutive elements that have their signs, and whether they are sampled, from one draw; half a lap."""
SAMPLED = 1 << 12
"""Chunks of linear weights that are sketched, on average, where the model has more: 2²⁹ elements."""
FORMAT = "1"
"""To be counted up with any change to the numbers above, or to what is drawn."""
STANDARD_ERROR = 1 / math.sqrt(WIDTH)
"""Of the cosine of two unrelated task vectors; less for similar ones."""


class Sketch:
    """The sketch of a whole task vector. The tensors may be added in any order, by any number of threads.

    What a tensor adds to a bucket is rounded to a grid of 2⁻⁴⁴ times the norm of the base, on which float64 sums are
    exact: they do not depend on the order.
    """

    def __init__(self, tensors: Mapping[str, BaseTensor]) -> None:
        """``tensors`` are the base's, always in the same order."""
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
        self._lock = Lock()

    def tensor(self, name: str) -> TensorSketch:
        """An empty sketch of one tensor."""
        tensor = self._tensors[name]
        return TensorSketch(self._starts[name], tensor.numel, self._share if tensor.role == "linear" else 1.0)

    def add(self, tensor: TensorSketch) -> None:
        if not is_finite(tensor.buckets):
            raise OverflowError("sums that float32 cannot hold")
        # Adding a number so large leaves a float64 no bits beyond the grid's.
        rounded = tensor.buckets.double().add_(self._grid).sub_(self._grid)
        with self._lock:
            for here, there in _wrapped(tensor.first, len(rounded)):
                self._buckets[there] += rounded[here]

    def add_elements(self, name: str, elements: Elements) -> None:
        """Add a tensor whose elements are made when they are asked for; those that are not sampled never are."""
        tensor = self.tensor(name)
        for start, stop in tensor.ranges():
            tensor.update(start, elements(start, stop))
        self.add(tensor)

    def values(self) -> Tensor:
        """The buckets as they are kept: in float16, scaled to a mean square of one."""
        import torch

        norm = torch.linalg.vector_norm(self._buckets)
        scaled = self._buckets * (math.sqrt(WIDTH) / norm) if norm else self._buckets
        return scaled.to(torch.float16)


class TensorSketch:
    """What one tensor adds to the sketch, fed with pieces of its task vector in their order.

    A tensor within one lap touches no more buckets than it has elements; they are counted from its first one on.
    """

    def __init__(self, position: int, numel: int, share: float) -> None:
        import torch

        self._position, self._numel, self._share = position, numel, share
        one_lap = position // WIDTH == (position + max(numel, 1) - 1) // WIDTH
        self.first = _bucket(position) if one_lap else 0
        self.buckets = torch.zeros(numel if one_lap else WIDTH)

    def update(self, start: int, piece: Tensor) -> None:
        """Add consecutive elements, ``start`` being the number of the first; CPU, any floating-point type."""
        import torch

        flat, signs = piece.reshape(-1), _signs()
        for begin, end in self.ranges(start, start + flat.numel()):
            values = flat[begin - start : end - start].to(torch.float32)
            chunk, offset = divmod(self._position + begin, CHUNK)
            drawn = _draw(chunk)
            weight = drawn.sign / math.sqrt(self._share)
            place = (_bucket(self._position + begin) - self.first) % WIDTH
            for here, there in _wrapped(place, end - begin):
                first = drawn.table + offset + here.start
                self.buckets[there].addcmul_(values[here], signs[first : first + here.stop - here.start], value=weight)

    def ranges(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """The elements that are sketched, from one to another, cut where a chunk ends."""
        stop = self._numel if stop is None else stop
        while start < stop:
            chunk, offset = divmod(self._position + start, CHUNK)
            end = min(start + CHUNK - offset, stop)
            if self._share == 1 or _draw(chunk).chance < self._share:
                yield start, end
            start = end


class Draw(NamedTuple):
    """What is drawn for a chunk."""

    table: int
    """Where its signs begin in the table"""
    sign: int
    chance: float
    """From 0 to 1: the chunks below the share are sampled"""


def _draw(chunk: int) -> Draw:
    bits = xxhash.xxh3_64_intdigest(f"chunk {chunk}".encode())
    return Draw(bits % CHUNK, 1 - 2 * (bits >> 63), (bits >> 20) % 2**32 / 2**32)


def _bucket(position: int) -> int:
    """Where an element goes, by its place in the line of all tensors."""
    lap, place = divmod(position, WIDTH)
    return (place + xxhash.xxh3_64_intdigest(f"lap {lap}".encode())) % WIDTH


@cache
def _signs() -> Tensor:
    """Two chunks of ±1, the same on every machine and for ever."""
    import numpy as np
    import torch

    stream = hashlib.shake_128(b"mergestream sketch").digest(2 * CHUNK // 8)
    bits = np.unpackbits(np.frombuffer(stream, np.uint8))
    return torch.from_numpy(1 - 2 * bits.astype(np.float32))


def _wrapped(start: int, count: int) -> Iterator[tuple[slice, slice]]:
    """``count`` buckets from ``start`` on, going round at the end, as pairs of slices: of the count, of the buckets."""
    before_end = min(count, WIDTH - start)
    yield slice(0, before_end), slice(start, start + before_end)
    if before_end < count:
        yield slice(before_end, count), slice(0, count - before_end)


def cosine(a: np.ndarray | None, b: np.ndarray | None) -> float | None:
    """The estimated cosine of two task vectors; None where one is unknown or zero."""
    if a is None or b is None:
        return None
    norms = math.sqrt(float(a @ a) * float(b @ b))
    return max(-1.0, min(1.0, float(a @ b) / norms)) if norms else None
