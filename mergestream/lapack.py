"""The eigendecomposition of a symmetric float64 matrix, with the last and longest step in lower precision.

``eigh`` is three steps: A = Q T Qᵀ with T tridiagonal, T = Z Λ Zᵀ, and the vectors Q Z. The eigenvalues and Z need
float64, the last product does not, and it is the longest. torch offers only the three together in one precision,
so the first two are called in the LAPACK that NumPy's wheels bring along and have loaded already. That is 1.5
times as fast (docs/performance.md). NumPy built in another way does not have these names: then torch does it all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int64, c_size_t, c_void_p
from functools import cache

import numpy.linalg
import torch
from torch import Tensor

_LENGTH_OF_A_LETTER = c_size_t(1)  # Fortran passes the length of every string behind the arguments


def eigh_upper(
    matrix: Tensor, dtype: torch.dtype, wanted: Callable[[Tensor], int] = Tensor.numel
) -> tuple[Tensor, Tensor]:
    """(values, vectors) of the symmetric n×n float64 matrix whose upper triangle is given; it is overwritten.

    The values are float64 and ascend; the vectors, one per column, have the given dtype. Of these there are only
    as many as ``wanted`` makes of the values, those of the largest: the last step is shorter then.
    """
    fits = matrix.device.type == "cpu" and matrix.is_contiguous() and matrix.shape[0] > 1
    lapack = _lapack() if fits else None
    if lapack is None:
        values, vectors = torch.linalg.eigh(matrix, UPLO="U")
        return values, vectors[:, len(values) - wanted(values) :].to(dtype)
    reflectors, tau, values, off_diagonal = _tridiagonalize(lapack, matrix)
    rows = _tridiagonal_vectors(lapack, values, off_diagonal)
    vectors = rows[len(values) - wanted(values) :].to(dtype).T
    # Q = H₁ … Hₙ₋₁ leaves the first coordinate alone: what remains is the Q of a QR decomposition.
    vectors[1:] = torch.ormqr(reflectors.to(dtype).T[1:, :-1], tau[:-1].to(dtype), vectors[1:])
    return values, vectors


@cache
def _lapack() -> ctypes.CDLL | None:
    """NumPy's own OpenBLAS (64-bit integers), where NumPy came as a wheel."""
    try:
        library = ctypes.CDLL(numpy.linalg._umath_linalg.__file__)
        _ = library.scipy_dsytrd_64_, library.scipy_dstedc_64_
        _ = library.scipy_openblas_set_num_threads64_, library.scipy_openblas_get_num_threads64_
    except (AttributeError, OSError):
        return None
    return library


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep that OpenBLAS to one thread for a while: it has one setting for the whole process."""
    lapack = _lapack()
    if lapack is None:
        yield
        return
    before = lapack.scipy_openblas_get_num_threads64_()
    lapack.scipy_openblas_set_num_threads64_(1)
    try:
        yield
    finally:
        lapack.scipy_openblas_set_num_threads64_(before)


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


def _tridiagonal_vectors(lapack: ctypes.CDLL, diagonal: Tensor, off_diagonal: Tensor) -> Tensor:
    """dstedc: divide and conquer. The diagonal becomes the eigenvalues; the rows returned are the eigenvectors."""
    n = diagonal.numel()
    vectors = diagonal.new_empty(n, n)
    work = diagonal.new_empty(1 + 4 * n + n * n)
    integer_work = torch.empty(3 + 5 * n, dtype=torch.int64)
    _call(
        lapack.scipy_dstedc_64_,
        "I", n, diagonal, off_diagonal, vectors, n, work, work.numel(), integer_work, integer_work.numel(),
    )  # fmt: skip
    return vectors


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
        raise RuntimeError(f"LAPACK's {routine.__name__} failed with INFO = {info.value}.")
