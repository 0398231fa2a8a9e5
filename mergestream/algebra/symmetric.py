"""Eigenvectors of symmetric matrices, each step in the precision that it needs.

``eigh`` is three steps: A = Q T Qᵀ with T tridiagonal, T = Z Λ Zᵀ, and the vectors Q Z. The last product, which is the
longest, never needs float64. For a float32 matrix the first step and Z are float32, too: only Λ is float64, because
the sum of many small eigenvalues matters. torch offers only the three together in one precision, so the first two are
called in the LAPACK that NumPy's wheels bring along and have loaded already. That is 1.5 times as fast (docs:
performance-notes.md). Other builds of NumPy lack these names: then torch does it all, in float64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int64, c_size_t, c_void_p
from functools import cache

import numpy.linalg
import torch
from torch import Tensor

# Gram matrices are summed in float64: what is smaller than this share of the largest eigenvalue is rounding.
NOISE = 1e-12

# From this size on and up to this share of all vectors, inverse iteration is faster with the products of any processor
# that was tried (docs: performance-notes.md). Where more are wanted, knowing the values first pays up to half of all.
_LEAST_SIZE = 512
_FEW = 0.2

# Inverse iteration leaves noise of 1e-40 in half of the entries. In float32 these are subnormal numbers, for which many
# processors take a hundred times as long (docs: performance-notes.md): few vectors would take longer than all.
_SUBNORMAL = 1e-30

_LENGTH_OF_A_LETTER = c_size_t(1)  # Fortran passes the length of every string behind the arguments


def leading_eigenvectors(
    matrix: Tensor,
    wanted: Callable[[Tensor], int] | None = None,
    dtype: torch.dtype | None = None,
    noise: float = NOISE,
) -> tuple[Tensor, Tensor]:
    """The eigenvalues above the ``noise``, descending, and the eigenvectors of the first of them, as columns.

    The matrix is symmetric, positive semidefinite, and float64 or float32. Its upper triangle is used, and it is
    overwritten. The values are float64, the vectors have the given dtype, by default the matrix's; ``noise`` is a share
    of the largest eigenvalue. ``wanted`` makes of the values how many vectors are needed: few are found faster. By
    default there is one for every value.
    """

    def leading(ascending: Tensor) -> tuple[Tensor, int]:
        values = ascending.flip(0)
        values = values[values > noise * values[:1].clamp(min=0)]
        return values, wanted(values) if wanted else len(values)

    n, dtype = matrix.shape[0], dtype or matrix.dtype
    fits = matrix.device.type == "cpu" and matrix.is_contiguous() and n > 1
    lapack = _lapack() if fits else None
    if lapack is None:
        ascending, vectors = torch.linalg.eigh(matrix.double(), UPLO="U")
        values, count = leading(ascending)
        return values, vectors[:, n - count :].to(dtype).flip(1)
    # LAPACK counts along columns, so that the upper triangle here is the lower one there.
    tau, diagonal, off_diagonal = matrix.new_empty(3, n)
    work = matrix.new_empty(64 * n)
    is_single = matrix.dtype == torch.float32
    tridiagonal_form = lapack.scipy_ssytrd_64_ if is_single else lapack.scipy_dsytrd_64_
    _call(tridiagonal_form, "L", n, matrix, n, diagonal, off_diagonal, tau, work, work.numel())
    if is_single or (wanted and n >= _LEAST_SIZE):
        ascending, destroyed = (x.to(torch.float64, copy=True) for x in (diagonal, off_diagonal))
        _call(lapack.scipy_dsterf_64_, n, ascending, destroyed)
        values, count = leading(ascending)
        few = ascending[n - count :] if count <= _FEW * n and not is_single else None
        rows = _eigenvectors(lapack, diagonal, off_diagonal, few)
    else:
        rows = _eigenvectors(lapack, diagonal, off_diagonal)
        values, count = leading(diagonal)
    rows = rows[len(rows) - count :]
    vectors = torch.hardshrink(rows, _SUBNORMAL, out=rows).to(dtype).T
    # Q = H₁ … Hₙ₋₁ leaves the first coordinate alone: what remains is the Q of a QR decomposition.
    vectors[1:] = torch.ormqr(matrix.to(dtype).T[1:, :-1], tau[:-1].to(dtype), vectors[1:])
    return values, vectors.flip(1)


@cache
def _lapack() -> ctypes.CDLL | None:
    """NumPy's own OpenBLAS (64-bit integers), where NumPy came as a wheel."""
    try:
        library = ctypes.CDLL(numpy.linalg._umath_linalg.__file__)
        for name in ("ssytrd", "sstedc", "dsytrd", "dstedc", "dsterf", "dstein"):
            getattr(library, f"scipy_{name}_64_")
    except (AttributeError, OSError):
        return None
    return library


def _eigenvectors(lapack: ctypes.CDLL, diagonal: Tensor, off_diagonal: Tensor, few: Tensor | None = None) -> Tensor:
    """The eigenvectors of T as rows: all by divide and conquer, or those of ``few`` eigenvalues by inverse iteration.

    With all of them, the eigenvalues take the place of the diagonal.
    """
    n = len(diagonal)
    if few is None:
        vectors, work = diagonal.new_empty(n, n), diagonal.new_empty(1 + 4 * n + n * n)
        integers = torch.empty(3 + 5 * n, dtype=torch.int64)
        workspace = work, work.numel(), integers, integers.numel()
        divide_and_conquer = lapack.scipy_sstedc_64_ if vectors.dtype == torch.float32 else lapack.scipy_dstedc_64_
        _call(divide_and_conquer, "I", n, diagonal, off_diagonal, vectors, n, *workspace)
    else:
        vectors, work = diagonal.new_empty(len(few), n), diagonal.new_empty(5 * n)
        block, end, *scratch = torch.full((4, n), n)
        block.fill_(1)  # T is one block, which ends with the matrix
        found = len(few), few, block, end, vectors
        _call(lapack.scipy_dstein_64_, n, diagonal, off_diagonal, *found, n, work, *scratch)
    return vectors


def _call(routine: ctypes._FuncPtr, *arguments: str | int | Tensor) -> None:  # type: ignore[name-defined]
    """Call a LAPACK routine (all by reference, INFO last); ctypes releases the GIL meanwhile."""
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
