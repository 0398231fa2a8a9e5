"""A small sketch of each task vector, so that cosines to all past experts are known without keeping them.

A count sketch: every element of Δ is added, with a pseudo-random sign, to one of ``WIDTH`` buckets. The cosine of
two sketches estimates the cosine c of the task vectors without bias, with a standard deviation of about
(1 − c²)/√WIDTH ≤ 0.002; an error of 0.01 is five of these.

The sketch of a small model is narrower, a hundredth of its parameters: the buckets are folded, laid over one another.
What is folded later gives the same, so that sketches of any widths can be compared, as well as the narrower one allows.

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
from collections.abc import Iterator, Mapping, Sequence
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
"""Buckets that all is added to: 512 KiB in float16."""
NARROWEST = 1 << 12
"""Buckets that are kept at least: 8 KiB, about what else is known of an expert."""
PARAMETERS = 100
"""Of the model for each bucket that is kept: the sketch takes a hundredth of a model in 16 bits at most."""
CHUNK = 1 << 17
"""Consecutive elements that have their signs, and whether they are sampled, from one draw; half a lap."""
SAMPLED = 1 << 12
"""Chunks of linear weights that are sketched, on average, where the model has more: 2²⁹ elements."""
FORMAT = "2"
"""To be counted up with any change to the numbers above, or to what is drawn."""
READABLE = ("1", FORMAT)
"""Those of format 1 are not folded."""
_BLOCK = 1 << 14
"""Buckets of all sketches that are multiplied at a time"""


def width_for(parameters: int) -> int:
    """How many buckets are kept of a model with so many parameters; a power of two."""
    return max(NARROWEST, min(WIDTH, 1 << (max(parameters // PARAMETERS, 1).bit_length() - 1)))


def error_of(width: int) -> float:
    """The standard error of the cosine of two unrelated task vectors; less for similar ones."""
    return 1 / math.sqrt(width)


class Sketch(Collector):
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
        self._width = width_for(end)
        self._lock = Lock()

    def tensor(self, name: str) -> TensorSketch:
        """An empty sketch of one tensor."""
        return TensorSketch(self._starts[name], self._tensors[name].numel, self.share(name))

    def share(self, name: str) -> float:
        """What of a tensor is sampled."""
        return self._share if self._tensors[name].role == "linear" else 1.0

    def add(self, tensor: TensorSketch) -> None:
        if not is_finite(tensor.buckets):
            raise OverflowError("sums that float32 cannot hold")
        # Adding a number so large leaves a float64 no bits beyond the grid's.
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
        """Add a tensor whose elements are made when they are asked for; those that are not sampled never are."""
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
        """The buckets as they are kept: folded, in float16, scaled to a mean square of one."""
        import torch

        kept = torch.from_numpy(folded(self._buckets.numpy(), self._width))
        norm = torch.linalg.vector_norm(kept)
        return (kept * (math.sqrt(self._width) / norm) if norm else kept).to(torch.float16)


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


def folded(buckets: np.ndarray, width: int) -> np.ndarray:
    """A sketch of fewer buckets: its parts over one another, each from a place of its own on, as laps are.

    The first part begins with the first element of the model, so that a model with no more elements stays exact.
    """
    import numpy as np

    if len(buckets) == width:
        return buckets
    parts = np.roll(buckets, -_bucket(0)).reshape(-1, width)
    turns = (xxhash.xxh3_64_intdigest(f"fold {number}".encode()) % width for number in range(len(parts)))
    return np.sum([np.roll(part, turn) for part, turn in zip(parts, turns, strict=True)], axis=0)


def cosines(sketches: Sequence[np.ndarray | None]) -> list[list[float | None]]:
    """The estimated cosines of all task vectors to each other; None where one is unknown or zero.

    Those of a store have one width, but for wide ones of a small model from before sketches were folded.
    """
    import numpy as np

    known = {number: sketch for number, sketch in enumerate(sketches) if sketch is not None and sketch.any()}
    found: list[list[float | None]] = [[None] * len(sketches) for _ in sketches]
    width = min(map(len, known.values()), default=0)
    alike = [sketch if len(sketch) == width else folded(sketch.astype(np.float32), width) for sketch in known.values()]
    products = np.zeros((len(known), len(known)))
    for start in range(0, width, _BLOCK):  # as one product: pair by pair, hundreds of experts take minutes
        block = np.array([sketch[start : start + _BLOCK] for sketch in alike], dtype=np.float32)
        products += block @ block.T
    norms = np.sqrt(np.diag(products))
    values = np.clip(products / np.outer(norms, norms), -1, 1).tolist()
    for i, row in zip(known, values, strict=True):
        for j, value in zip(known, row, strict=True):
            found[i][j] = value
    return found
