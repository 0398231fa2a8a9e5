"""A small sketch of each task vector, so that cosines to all past experts are known without keeping them.

A count sketch: every element of Δ is added, with a pseudo-random sign, to one of ``WIDTH`` buckets. The cosine of
two sketches estimates the cosine c of the task vectors without bias, with a standard deviation of at most
(1 − c²)/√WIDTH ≈ 0.002; an error of 0.01 is five of these.

The buckets are not drawn element by element, which would make every element a random access. A chunk of consecutive
elements goes to consecutive buckets from a random one on, with signs read from a table from a random place on and
with a random sign for the chunk; all three are drawn by hashing the tensor's name and the chunk's number. Elements
of two chunks then meet with probability 1/WIDTH, as in the textbook, and elements of one chunk never do. Adding a
chunk is one multiply-add over contiguous memory, about 0.2 ns an element.

Of a large linear weight, whose change is spread over all its rows, a random ``SAMPLED`` of its chunks are enough, the
same for every expert and weighted so that cosines stay without bias. Task vectors in factors are multiplied out for
their sketch, and this leaves a small part of that to do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from mergestream.errors import MergestreamError

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 1 << 18
"""Buckets: 512 KiB in float16."""
CHUNK = 1 << 17
"""Consecutive elements that go to consecutive buckets. Neither number may ever change for sketches of this format."""
SAMPLED = 32
"""Chunks of a linear weight that are sketched, on average, where it has more."""
FORMAT = "1"
NAME = "sketch"
STANDARD_ERROR = 1 / math.sqrt(WIDTH)
"""Of the cosine of two unrelated task vectors; less for similar ones."""


class Sketch:
    """The sketch of a whole task vector. The tensors may be added in any order, by any number of threads.

    ``magnitude`` is of the order of the model's norm. What a tensor adds to a bucket is rounded to a grid of
    2⁻⁴⁴ magnitudes, on which float64 sums are exact: they do not depend on the order.
    """

    def __init__(self, magnitude: float) -> None:
        import torch

        power = 2.0 ** math.ceil(math.log2(magnitude)) if magnitude else 1.0
        self._grid = 1.5 * 2.0 ** (52 - 44) * power
        self._buckets = torch.zeros(WIDTH, dtype=torch.float64)
        self._lock = Lock()

    def add(self, tensor: TensorSketch) -> None:
        # Adding a number so large leaves a float64 no bits beyond the grid's.
        rounded = (tensor.buckets.double() + self._grid) - self._grid
        with self._lock:
            for here, there in _wrapped(tensor.first, len(rounded)):
                self._buckets[there] += rounded[here]

    def values(self) -> Tensor:
        """The buckets as they are kept: in float16, scaled to a mean square of one."""
        import torch

        norm = torch.linalg.vector_norm(self._buckets)
        scaled = self._buckets * (math.sqrt(WIDTH) / norm) if norm else self._buckets
        return scaled.to(torch.float16)


class TensorSketch:
    """What one tensor adds to the sketch, fed with pieces of its task vector in their order.

    Buckets are counted from the first chunk's on, so that a small tensor touches no more of them than it has elements.
    """

    def __init__(self, name: str, numel: int, *, linear: bool = False) -> None:
        import torch

        self._name = name
        self._share = min(1.0, SAMPLED * CHUNK / numel) if linear and numel else 1.0
        self.first = _draw(name, 0).bucket
        self.buckets = torch.zeros(numel if numel <= CHUNK else WIDTH)

    def update(self, start: int, piece: Tensor) -> None:
        """Add consecutive elements, ``start`` being the number of the first; CPU, any floating-point type."""
        import torch

        flat, signs = piece.reshape(-1), _signs()
        stop = start + flat.numel()
        while start < stop:
            chunk, offset = divmod(start, CHUNK)
            count = min(CHUNK - offset, stop - start)
            if self.takes(chunk):
                drawn, values = _draw(self._name, chunk), flat[:count].to(torch.float32)
                weight = drawn.sign / math.sqrt(self._share)
                for here, there in _wrapped((drawn.bucket - self.first + offset) % WIDTH, count):
                    sign = drawn.table + offset + here.start
                    taken = signs[sign : sign + here.stop - here.start]
                    self.buckets[there].addcmul_(values[here], taken, value=weight)
            flat = flat[count:]
            start += count

    def takes(self, chunk: int) -> bool:
        """Whether a chunk is sketched: all are, but of large linear weights."""
        return self._share == 1 or _draw(self._name, chunk).chance < self._share


def sketch_elements(
    name: str, numel: int, elements: Callable[[int, int], Tensor], *, linear: bool = False
) -> TensorSketch:
    """The sketch of a tensor whose elements, from one to another, are made when they are asked for."""
    sketched = TensorSketch(name, numel, linear=linear)
    for start in range(0, numel, CHUNK):
        if sketched.takes(start // CHUNK):
            sketched.update(start, elements(start, min(start + CHUNK, numel)))
    return sketched


class Draw(NamedTuple):
    """Where the elements of a chunk go, and with which signs."""

    bucket: int
    table: int
    sign: int
    chance: float
    """From 0 to 1: the chunks below a tensor's share are sketched"""


def _draw(name: str, chunk: int) -> Draw:
    bits = xxhash.xxh3_64_intdigest(f"{name}\0{chunk}".encode())
    return Draw(bits % WIDTH, (bits >> 20) % CHUNK, 1 - 2 * (bits >> 63), (bits >> 37) % 2**26 / 2**26)


@cache
def _signs() -> Tensor:
    """Two chunks of ±1, the same on every machine and for ever."""
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


def write_sketch(directory: Path, values: Tensor) -> str:
    """Keep a sketch as ``sketch.safetensors``; returns its digest."""
    from mergestream.checkpoints import SafetensorsWriter, TensorSpec
    from mergestream.digest import tensor_digest

    layout = {NAME: TensorSpec("F16", (WIDTH,))}
    with SafetensorsWriter(directory, layout, prefix=NAME, metadata={"sketch": FORMAT}) as writer:
        writer.write(NAME, values)
    return tensor_digest(values)


def read_sketch(directory: Path) -> np.ndarray | None:
    """The sketch of an expert in float32, or None where none was kept."""
    from safetensors import SafetensorError, safe_open

    path = directory / f"{NAME}.safetensors"
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            if (file.metadata() or {}).get("sketch") != FORMAT:
                raise MergestreamError(f"{path} is a sketch of another version of mergestream; upgrade mergestream")
            values: np.ndarray = file.get_tensor(NAME)
    except (OSError, SafetensorError) as error:
        raise MergestreamError(f"{path} is damaged: {error}; restore it from a backup") from error
    return values.astype(np.float32)


def cosine(a: np.ndarray | None, b: np.ndarray | None) -> float | None:
    """The estimated cosine of two task vectors; None where one is unknown or zero."""
    if a is None or b is None:
        return None
    norms = math.sqrt(float(np.dot(a, a)) * float(np.dot(b, b)))
    return max(-1.0, min(1.0, float(np.dot(a, b)) / norms)) if norms else None
