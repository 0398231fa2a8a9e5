"""Process tensors in pieces.

A piece is small enough to stay in the processor's cache between reading, subtracting, absorbing and writing, and large
enough that the calls from Python do not count. It is also below the size up to which the engine has malloc
keep what is freed: fresh memory for every piece made the same arithmetic ten times slower (docs: performance-notes.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

PIECE = 1 << 19
"""Elements in a piece; the merged model does not depend on it"""
Elements = Callable[[int, int], "Tensor"]
"""Any range of a flattened tensor, by its start and its end."""
LARGEST_NORM = 1e140
"""float64 cannot hold the square of a larger norm, and loses digits below its inverse"""
_RUN = 1 << 10
_BLOCK = 1 << 16
_TINY = 1e-27
_PHILOX = 8
"""32-bit numbers per count of Philox"""


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor as the matrix with its first dimension as rows."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


def ranges(numel: int) -> Iterator[tuple[int, int]]:
    """The pieces of a tensor, in order, each from one element to another."""
    for start in range(0, numel, PIECE):
        yield start, min(start + PIECE, numel)


class SquaredNorm:
    """‖x‖² of a tensor that arrives in consecutive pieces: precise to 1e-8, and bit-identical for any piece size.

    Runs of 1024 float32 squares are summed in float32, as dot products, and blocks of 64 runs in float64: six times
    as fast as float64 throughout. Blocks begin at multiples of their size, and their sums are added up exactly.
    """

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._rest: NDArray[Any] | None = None
        """The elements after the last whole block, none of which are in the sums yet"""
        self.finite = True
        """Whether all elements so far were finite, and small enough for float64 to hold their squares"""

    def add(self, piece: Tensor) -> None:
        import numpy as np

        flat = piece.detach().cpu().reshape(-1)
        values: NDArray[Any] = (flat if flat.dtype.itemsize >= 4 else flat.float()).numpy()
        if self._rest is not None:
            values = np.concatenate([self._rest, values])
        whole = len(values) - len(values) % _BLOCK
        self._append(_run_sums(values[:whole]).reshape(-1, _BLOCK // _RUN).sum(axis=1))
        self._rest = values[whole:].copy() if whole < len(values) else None  # the caller reuses the piece's memory
        self.finite = self.finite and (self._rest is None or bool(np.isfinite(self._rest).all()))

    def total(self) -> float:
        """‖x‖²: infinite where float64 cannot hold it, and zero only if all elements are."""
        if self._rest is not None:
            whole = len(self._rest) - len(self._rest) % _RUN
            self._append([_run_sums(self._rest[:whole]).sum(), _float64_sums(self._rest[None, whole:])[0]])
            self._rest = None
        return exact_sum(self._sums)

    def _append(self, sums: Iterable[float]) -> None:
        found = [float(value) for value in sums]
        self._sums += found
        self.finite = self.finite and all(map(math.isfinite, found))


def exact_sum(values: Iterable[float]) -> float:
    """The sum of the values, the same for any order; infinite where float64 cannot hold it."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def is_finite(x: Tensor) -> bool:
    """Whether a tensor has neither NaN nor Inf; its sum is checked first, because that is fast."""
    return not x.is_floating_point() or math.isfinite(float(x.sum())) or bool(x.isfinite().all())


def squared_norm(x: Tensor) -> float:
    """‖x‖² of a whole tensor."""
    norm = SquaredNorm()
    norm.add(x)
    return norm.total()


def _run_sums(values: NDArray[Any]) -> NDArray[Any]:
    """The sum of squares of every run, in float64; runs whose squares float32 cannot hold are summed again."""
    import numpy as np

    runs = values.reshape(-1, _RUN)
    with np.errstate(over="ignore", invalid="ignore"):
        sums: NDArray[Any] = np.matmul(runs[:, None], runs[:, :, None]).reshape(-1).astype(np.float64)
    doubtful = ~((sums > _TINY) & (sums < math.inf))
    if doubtful.any() and (again := runs[doubtful]).any():
        sums[doubtful] = _float64_sums(again)
    return sums


def _float64_sums(rows: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        sums: NDArray[Any] = np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
    if not sums.all():  # squares that float64 rounds to zero
        sums[(sums == 0) & rows.any(axis=1)] = np.nextafter(0, 1)
    return sums


def chosen(key: int, share: float, start: int, count: int) -> Tensor:
    """Which of ``count`` elements from ``start`` on belong to a random ``share`` of all; ``key`` has 128 bits.

    The same for pieces of any size, on every machine and device: Philox makes its numbers of a key and a counter. NumPy
    promises that its stream stays what it is, which torch does not of its generators.
    """
    import numpy as np
    import torch

    first, skipped = divmod(start, _PHILOX)
    stream = np.random.Philox(key=key).advance(first)
    numbers = stream.random_raw((skipped + count + 1) // 2).astype("<u8", copy=False).view("<u4")
    return torch.from_numpy(numbers[skipped : skipped + count] < round(share * 2**32))
