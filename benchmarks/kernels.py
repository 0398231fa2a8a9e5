"""The OPCM kernel: alternatives, and the minimal kernels of an OPCM step.

    python -m benchmarks.kernels                                    the tables of docs/explanation/performance-notes.md
    python -m benchmarks.kernels --base B --experts E1 E2           the limit for one step on these checkpoints
    OPENBLAS_CORETYPE=Haswell python -m benchmarks.kernels          with the products of another processor

The tables compare ways to decompose S and project Δ on one thread, interleaved. They print the median CPU seconds
(which a busy machine changes little), the ratio to ours and the error of P(Δ) against a float64 SVD. The limit runs
only the minimal kernels, for all linear weights in memory, on all cores: half a Gram matrix, its eigendecomposition,
and the three products S·V, Uᵀ·Δ and U·(removed part), for the block projection only of the protected directions.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy
import torch
from torch import Tensor

from benchmarks.stopwatch import work
from mergestream.algebra import symmetric
from mergestream.algebra.products import gram as _gram
from mergestream.algebra.projection import Projection, project_dense, protected_directions
from mergestream.algebra.svd import ThinSVD, numerical_rank, thin_svd
from mergestream.checkpoints import open_checkpoint
from mergestream.engine import single_threaded

SHAPES = [(768, 768), (3072, 768), (768, 3072), (1024, 1024), (4096, 1024)]
Decompose = Callable[[Tensor], ThinSVD]
Kernel = Callable[[Tensor, Tensor, int], Tensor]  # S, Δ, q ↦ P(Δ)


# --- the limit


def bare_kernels(S: Tensor, delta: Tensor, projection: Projection) -> None:
    if S.shape[0] < S.shape[1]:
        S, delta = S.T, delta.T
    _, v = symmetric.leading_eigenvectors(_gram(S), protected_vectors if projection == "block" else None, S.dtype)
    u = S @ v
    removed = u.T @ delta
    if projection == "block":
        removed = (removed @ v) @ v.T
    torch.addmm(delta, u, removed, out=torch.empty_like(delta))


def protected_vectors(values: Tensor) -> int:
    return protected_directions(values.sqrt(), alpha=0.5)


def on_all_cores(pairs: list[tuple[Tensor, Tensor]], projection: Projection) -> None:
    def run(pair: tuple[Tensor, Tensor]) -> None:
        torch.set_num_threads(1)
        bare_kernels(*pair, projection)

    largest_first = sorted(pairs, key=lambda pair: -pair[0].numel())
    with single_threaded(), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, largest_first))


def linear_pairs(base: Path, first: Path, second: Path) -> list[tuple[Tensor, Tensor]]:
    """Return (S, Δ) of every weight matrix except embeddings, as in a store's second step."""
    with open_checkpoint(base) as b, open_checkpoint(first) as one, open_checkpoint(second) as two:
        names = [name for name, info in b.tensors.items() if len(info.shape) == 2 and "embed" not in name]
        bases = {name: b.read(name).float() for name in names}
        return [(one.read(name).float() - bases[name], two.read(name).float() - bases[name]) for name in names]


# --- alternatives


def full_svd(S: Tensor, delta: Tensor, q: int) -> Tensor:
    """Project as FusionBench does: Δ in complete bases, diagonal and leading block set to zero, and back."""
    u, _, vh = torch.linalg.svd(S, full_matrices=True)
    core = u.T @ delta @ vh.T
    core.diagonal().zero_()
    core[:q, :q] = 0
    projected: Tensor = u @ core @ vh
    return projected


def with_thin_products(decompose: Decompose) -> Kernel:
    return lambda S, delta, q: project_dense(delta, decompose(S), q, "reference")


def thin_float32_svd(S: Tensor) -> ThinSVD:
    u, s, vh = torch.linalg.svd(S, full_matrices=False)
    return ThinSVD(u, s.double(), vh.T)


def by_eigenvectors(vectors: Callable[[Tensor], Tensor]) -> Kernel:
    """Compute V, the eigenvectors of SᵀS, by a given way, then U = S V Σ⁻¹ in float32."""

    def decompose(S: Tensor) -> ThinSVD:
        if S.shape[0] < S.shape[1]:
            return decompose(S.T).transposed()
        v = vectors(S).float()
        u = S @ v
        s = torch.linalg.vector_norm(u, dim=0)
        rank = numerical_rank(s, 1e-5)
        return ThinSVD((u / s)[:, :rank], s[:rank].double(), v[:, :rank])

    return with_thin_products(decompose)


def gram(S: Tensor, dtype: torch.dtype) -> Tensor:
    return S.to(dtype).T @ S.to(dtype)


def shifted_inverse(S: Tensor) -> Tensor:
    """Return τ(SᵀS + τ)⁻¹ in float64: the same eigenvectors, with eigenvalues that float32 can separate."""
    g = gram(S, torch.float64)
    tau = 0.1 * g.trace() / g.shape[0]
    g.diagonal().add_(tau)
    return torch.cholesky_inverse(torch.linalg.cholesky(g)).mul_(tau)


def float64_products(S: Tensor) -> ThinSVD:
    if S.shape[0] < S.shape[1]:
        return float64_products(S.T).transposed()
    wide = S.double()
    values, v = torch.linalg.eigh(wide.T @ wide)
    s, v = values.flip(0).clamp_(min=0).sqrt_(), v.flip(1)
    return ThinSVD((wide @ v / s).float(), s, v.float())


TRIED: dict[str, Kernel] = {
    "full float32 SVD and products (FusionBench's)": full_svd,
    "thin float32 SVD": with_thin_products(thin_float32_svd),
    "float32 Gram, float32 eigh": by_eigenvectors(
        lambda S: torch.linalg.eigh(gram(S, torch.float32)).eigenvectors.flip(1)
    ),
    "float32 Gram, float64 eigh": by_eigenvectors(
        lambda S: torch.linalg.eigh(gram(S, torch.float32).double()).eigenvectors.flip(1)
    ),
    "float64 Gram, float32 eigh": by_eigenvectors(
        lambda S: torch.linalg.eigh(gram(S, torch.float64).float()).eigenvectors.flip(1)
    ),
    "float64 Gram, shifted inverse, float32 eigh": by_eigenvectors(
        lambda S: torch.linalg.eigh(shifted_inverse(S).float()).eigenvectors
    ),
    "float64 Gram, float64 eigh, U in float64": with_thin_products(float64_products),
    "float64 Gram, float64 eigh, U in float32": by_eigenvectors(
        lambda S: torch.linalg.eigh(gram(S, torch.float64)).eigenvectors.flip(1)
    ),
    "half float64 Gram, NumPy's float64 eigh, U in float32": by_eigenvectors(
        lambda S: torch.from_numpy(numpy.linalg.eigh(_gram(S).numpy(), UPLO="U").eigenvectors).flip(1)
    ),
    "kept: half float64 Gram, eigh with float32 vectors, U in float32": with_thin_products(thin_svd),
}


def random_matrix(m: int, n: int, decay: float, seed: int) -> Tensor:
    """Return a matrix with σᵢ = i^-decay and random singular vectors."""
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    u, v = (torch.linalg.qr(torch.randn(size, k, generator=generator, dtype=torch.float64)).Q for size in (m, n))
    matrix: Tensor = (u * torch.arange(1, k + 1).double() ** -decay) @ v.T
    return matrix.float()


def tables(decay: float, repetitions: int) -> None:
    print(f"{_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__},")
    print(f"NumPy {numpy.__version__}; σᵢ ∝ i^-{decay}, α = 0.5, medians of {repetitions} interleaved rounds\n")
    for m, n in SHAPES:
        kernel_table(m, n, decay, repetitions)
    for m, n in ((768, 768), (3072, 768), (1024, 1024)):
        parts_table(m, n, decay, repetitions)
        block_table(m, n, decay, repetitions)
    for n in (384, 768, 1024, 2048):
        eigensolver_table(n, decay, repetitions)


def kernel_table(m: int, n: int, decay: float, repetitions: int) -> None:
    S, delta = random_matrix(m, n, decay, 0), random_matrix(m, n, decay, 1)
    u, s, vh = torch.linalg.svd(S.double(), full_matrices=False)
    q = protected_directions(s, 0.5)
    exact = project_dense(delta.double(), ThinSVD(u, s, vh.T), q, "reference")
    errors = {name: (run(S, delta, q) - exact).norm() / exact.norm() for name, run in TRIED.items()}
    medians = interleaved({name: partial(run, S, delta, q) for name, run in TRIED.items()}, repetitions)
    kept = list(medians.values())[-1]
    print(f"| {m}×{n} | CPU ms | of the kept | error |\n|---|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median * 1e3:.0f} | {median / kept:.2f} | {float(errors[name]):.0e} |")
    print(flush=True)


def parts_table(m: int, n: int, decay: float, repetitions: int) -> None:
    """Time the parts of our kernel."""
    S, delta = random_matrix(m, n, decay, 0), random_matrix(m, n, decay, 1)
    library = symmetric._lapack()
    if library is None:
        return

    def tridiagonalize() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        matrix, work = _gram(S), torch.empty(64 * S.shape[1], dtype=torch.float64)
        tau, diagonal, off_diagonal = matrix.new_empty(3, len(matrix))
        arguments = len(matrix), matrix, len(matrix), diagonal, off_diagonal, tau, work, work.numel()
        symmetric._call(library.scipy_dsytrd_64_, "L", *arguments)
        return matrix, tau, diagonal, off_diagonal

    reflectors, tau, diagonal, off_diagonal = tridiagonalize()
    z = symmetric._eigenvectors(library, diagonal.clone(), off_diagonal.clone()).float().T
    medians = interleaved(
        {
            "Gram matrix (syrk, float64)": lambda: _gram(S),
            "the same as a full product": lambda: gram(S, torch.float64),
            "tridiagonal form, float64": tridiagonalize,
            "its vectors, float64": lambda: symmetric._eigenvectors(library, diagonal.clone(), off_diagonal.clone()),
            "their rotation, float32": lambda: torch.ormqr(reflectors.float().T[1:, :-1], tau[:-1].float(), z[1:]),
            "one of three products, float32": lambda: S.T @ delta,
        },
        repetitions,
    )
    medians["tridiagonal form, float64"] -= medians["Gram matrix (syrk, float64)"]
    print_milliseconds(f"{m}×{n}, parts", medians)


def block_table(m: int, n: int, decay: float, repetitions: int) -> None:
    """Compare the block projection, which needs only the protected vectors, with the reference one, which needs all."""
    S, delta = random_matrix(m, n, decay, 0), random_matrix(m, n, decay, 1)
    protected = partial(protected_directions, alpha=0.5)
    q = protected(thin_svd(S).s)
    medians = interleaved(
        {
            "reference projection": lambda: project_dense(delta, thin_svd(S), q, "reference"),
            "block projection, all vectors": lambda: project_dense(delta, thin_svd(S), q, "block"),
            "block projection, protected vectors": lambda: project_dense(
                delta, thin_svd(S, leading=protected), q, "block"
            ),
        },
        repetitions,
    )
    print_milliseconds(f"{m}×{n}, {q} directions protected", medians)


def eigensolver_table(n: int, decay: float, repetitions: int) -> None:
    """Time all eigenvectors in several ways, and a part of them in ours; a part must not cost more than all."""
    matrix = _gram(random_matrix(n, n, decay, 0))

    def ours(wanted: Callable[[Tensor], int] | None = None) -> Callable[[], object]:
        return lambda: symmetric.leading_eigenvectors(matrix.clone(), wanted, torch.float32)

    def leading(part: int) -> Callable[[], object]:
        return ours(lambda values: n // part)

    medians = interleaved(
        {
            "torch, float64": lambda: torch.linalg.eigh(matrix, UPLO="U"),
            "torch, float32": lambda: torch.linalg.eigh(matrix.float(), UPLO="U"),
            "NumPy, float64": lambda: numpy.linalg.eigh(matrix.numpy(), UPLO="U"),
            "kept: float64 values, float32 vectors": ours(),
            **{f"the same, 1/{part} of the vectors": leading(part) for part in (8, 5, 4, 2)},
        },
        repetitions,
    )
    print_milliseconds(f"eigh {n}×{n}", medians)


def print_milliseconds(title: str, medians: dict[str, float]) -> None:
    print(f"| {title} | CPU ms |\n|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median * 1e3:.0f} |")
    print(flush=True)


def interleaved(runs: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Return the median CPU seconds of each function on this thread; every round runs all."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            started = time.thread_time()
            run()
            seconds[name].append(time.thread_time() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--experts", type=Path, nargs=2)
    parser.add_argument("--projection", choices=["reference", "block"], default="reference", help="of the limit")
    parser.add_argument("--decay", type=float, default=0.7, help="of the singular values in the table")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.base is None:
        with single_threaded():
            return tables(arguments.decay, arguments.repetitions)
    pairs = linear_pairs(arguments.base, *arguments.experts)
    with work():
        on_all_cores(pairs, arguments.projection)


if __name__ == "__main__":
    main()
