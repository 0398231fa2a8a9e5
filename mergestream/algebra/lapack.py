"""The eigendecomposition of a symmetric float64 matrix, with the last and longest step in lower precision.

``eigh`` is three steps: A = Q T Qᵀ with T tridiagonal, T = Z Λ Zᵀ, and the vectors Q Z. The eigenvalues and Z need
float64, the last product does not, and it is the longest. torch offers only the three together in one precision,
so the first two are called in the LAPACK that NumPy's wheels bring along and have loaded already. That is 1.5
times as fast (docs: performance-notes.md). Other builds of NumPy lack these names: then torch does it all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int64, c_size_t, c_void_p
from functools import cache

import numpy.linalg
import torch
from torch import Tensor

_LENGTH_OF_A_LETTER = c_size_t(1)  # Fortran passes the length of every string behind the arguments


# From this size on and up to this share of all vectors, inverse iteration is faster with the products of any processor
# that was tried (docs: performance-notes.md). Where more are wanted, knowing the values first pays up to half of all.
_LEAST_SIZE = 512
_FEW = 0.2

# Inverse iteration leaves noise of 1e-40 in half of the entries. In float32 these are subnormal numbers, for which many
# processors take a hundred times as long (docs: performance-notes.md): few vectors would take longer than all.
_NOISE = 1e-30


def eigh_upper(
    matrix: Tensor, dtype: torch.dtype, wanted: Callable[[Tensor], int] | None = None
) -> tuple[Tensor, Tensor]:
    """(values, vectors) of the symmetric n×n float64 matrix whose upper triangle is given; it is overwritten.

    The values are float64 and ascend; the vectors, one per column, have the given dtype. With ``wanted`` there are
    only as many as it makes of the values, those of the largest, and they are found faster.
    """
    fits = matrix.device.type == "cpu" and matrix.is_contiguous() and matrix.shape[0] > 1
    lapack = _lapack() if fits else None
    if lapack is None:
        values, vectors = torch.linalg.eigh(matrix, UPLO="U")
        unwanted = len(values) - wanted(values) if wanted else 0
        return values, vectors[:, unwanted:].to(dtype)
    reflectors, tau, diagonal, off_diagonal = _tridiagonalize(lapack, matrix)
    if wanted and matrix.shape[0] >= _LEAST_SIZE:
        values, rows = _largest_vectors(lapack, diagonal, off_diagonal, wanted)
    else:
        values, rows = _all_vectors(lapack, diagonal, off_diagonal)
        rows = rows[len(rows) - wanted(values) :] if wanted else rows
    vectors = torch.hardshrink(rows, _NOISE, out=rows).to(dtype).T
    # Q = H₁ … Hₙ₋₁ leaves the first coordinate alone: what remains is the Q of a QR decomposition.
    vectors[1:] = torch.ormqr(reflectors.to(dtype).T[1:, :-1], tau[:-1].to(dtype), vectors[1:])
    return values, vectors


@cache
def _lapack() -> ctypes.CDLL | None:
    """NumPy's own OpenBLAS (64-bit integers), where NumPy came as a wheel."""
    try:
        library = ctypes.CDLL(numpy.linalg._umath_linalg.__file__)
        _ = library.scipy_dsytrd_64_, library.scipy_dstedc_64_, library.scipy_dsterf_64_, library.scipy_dstein_64_
    except (AttributeError, OSError):
        return None
    return library


def _tridiagonalize(lapack: ctypes.CDLL, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dsytrd: Householder reflectors (in place of the matrix) with their factors, T's diagonal and off-diagonal.

    LAPACK counts along columns, so that the upper triangle here is the lower one there.
    """
    n = matrix.shape[0]
    tau, diagonal, off_diagonal = matrix.new_empty(3, n)
    work = matrix.new_empty(64 * n)
    _call(
        lapack.scipy_dsytrd_64_,
        "L", n, matrix, n, diagonal, off_diagonal, tau, work, work.numel(),
    )  # fmt: skip
    return matrix, tau, diagonal, off_diagonal


def _all_vectors(lapack: ctypes.CDLL, diagonal: Tensor, off_diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """dstedc: divide and conquer. The eigenvalues take the place of the diagonal; the rows are the eigenvectors."""
    n = diagonal.numel()
    vectors = diagonal.new_empty(n, n)
    work = diagonal.new_empty(1 + 4 * n + n * n)
    integer_work = torch.empty(3 + 5 * n, dtype=torch.int64)
    _call(
        lapack.scipy_dstedc_64_,
        "I", n, diagonal, off_diagonal, vectors, n, work, work.numel(), integer_work, integer_work.numel(),
    )  # fmt: skip
    return diagonal, vectors


def _largest_vectors(
    lapack: ctypes.CDLL, diagonal: Tensor, off_diagonal: Tensor, wanted: Callable[[Tensor], int]
) -> tuple[Tensor, Tensor]:
    """All eigenvalues (dsterf), and as rows the eigenvectors of the largest: by inverse iteration (dstein) if few."""
    n = diagonal.numel()
    values, destroyed = diagonal.clone(), off_diagonal.clone()
    _call(lapack.scipy_dsterf_64_, n, values, destroyed)
    count = wanted(values)
    if count > _FEW * n:
        return values, _all_vectors(lapack, diagonal, off_diagonal)[1][n - count :]
    vectors = diagonal.new_empty(count, n)
    block, end_of_block = torch.ones(n, dtype=torch.int64), torch.full((n,), n)  # one block, all of the matrix
    work, integer_work = diagonal.new_empty(5 * n), torch.empty(2 * n, dtype=torch.int64)
    _call(
        lapack.scipy_dstein_64_,
        n, diagonal, off_diagonal, count, values[n - count :], block, end_of_block, vectors, n,
        work, integer_work[:n], integer_work[n:],
    )  # fmt: skip
    return values, vectors


def _call(routine: ctypes._FuncPtr, *arguments: str | int | Tensor) -> None:  # type: ignore[name-defined]
    """Calls a LAPACK routine (all by reference, INFO last); ctypes releases the GIL meanwhile."""
    info = c_int64(0)
    passed: list[object] = []
    for argument in arguments:
        if isinstance(argument, str):
            passed.append(c_char_p(argument.encode()))
        elif isinstance(argument, int):
            passed.append(byref(c_int64(argument)))
        else:
            passed.append(c_void_p(argument.data_ptr()))
    routine(*passed, byref(info), _LENGTH_OF_A_LETTER)
    if info.value != 0:
        raise ArithmeticError(f"LAPACK's {routine.__name__} failed with INFO = {info.value}.")
