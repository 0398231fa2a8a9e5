"""Cost and accuracy of the leading n/8 singular triplets, by exact and by randomised SVD.

    python -m benchmarks.truncated                                   matrices like task vectors (σᵢ ∝ i^-0.7)
    python -m benchmarks.truncated --spectrum gaussian               the slowest to converge
    python -m benchmarks.truncated --base B --experts E1 E2 …        the matrices of real experts, all together

Everything runs on one thread, interleaved. Prints medians of the thread's CPU seconds, which a busy machine changes
little. Each method is compared with its minimal kernels: half a float64 Gram matrix and its leading eigenvectors; or
half a float32 Gram matrix, as many products with it as the method used, and one product with the matrix.
`torch.svd_lowrank` gets the same number of columns and its default of two power iterations.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy
import torch
from torch import Tensor

from benchmarks.checkpoints import task_vector
from benchmarks.kernels import _processor, interleaved
from mergestream.algebra import truncated
from mergestream.algebra.products import gram
from mergestream.algebra.symmetric import leading_eigenvectors
from mergestream.algebra.truncated import truncated_svd
from mergestream.checkpoints import open_checkpoint
from mergestream.engine import single_threaded

SHAPES = [
    *[(384, 384), (1536, 384), (768, 768), (3072, 768), (1024, 1024), (4096, 1024)],
    *[(2048, 2048), (4096, 2048), (4096, 4096), (11008, 4096)],
]
SHARE = 8
COLUMNS = ["exact", "bare eigenvectors", "randomised", "bare products", "torch.svd_lowrank"]


def directions(matrix: Tensor) -> tuple[int, int]:
    """Return how many triplets are kept, and how many columns the randomised SVD uses."""
    rank = min(matrix.shape) // SHARE
    return rank, truncated.block_width(rank)


def bare_eigenvectors(matrix: Tensor) -> None:
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    leading_eigenvectors(gram(tall), lambda values: directions(matrix)[0], matrix.dtype)


def bare_products(matrix: Tensor, products: int) -> None:
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    width = directions(matrix)[1]
    multiply, x = truncated._multiply_by_gram(tall, width), torch.ones(tall.shape[1], width)
    for _ in range(products):
        multiply(x)
    tall @ x


def products_taken(matrix: Tensor) -> int:
    """Run the products with SᵀS that the subspace iteration needs."""
    taken = 0

    def counted(matrix: Tensor, width: int) -> Callable[[Tensor], Tensor]:
        multiply = made(matrix, width)

        def counting(x: Tensor) -> Tensor:
            nonlocal taken
            taken += 1
            return multiply(x)

        return counting

    made = truncated._multiply_by_gram
    with patch.object(truncated, "_multiply_by_gram", counted):
        truncated_svd(matrix, directions(matrix)[0], "randomised")
    return taken


def missed(matrix: Tensor) -> tuple[float, float]:
    """Return the shares of the exact triplets' energy that the randomised ones and torch's miss."""
    rank, width = directions(matrix)
    exact, ours = (truncated_svd(matrix, rank, method).s.square().sum() for method in ("exact", "randomised"))
    torch.manual_seed(0)
    torchs = torch.svd_lowrank(matrix, width)[1][:rank].double().square().sum()
    return 1 - float(ours / exact), 1 - float(torchs / exact)


def seconds(matrix: Tensor, products: int, repetitions: int) -> list[float]:
    rank, width = directions(matrix)
    runs: list[Callable[[], object]] = [
        partial(truncated_svd, matrix, rank, "exact"),
        partial(bare_eigenvectors, matrix),
        partial(truncated_svd, matrix, rank, "randomised"),
        partial(bare_products, matrix, products),
        partial(torch.svd_lowrank, matrix, width),
    ]
    return list(interleaved(dict(zip(COLUMNS, runs, strict=True)), repetitions).values())


def print_row(title: str, rank: str, spent: list[float], products: str, ours: float, torchs: float) -> None:
    exact, bare_exact, randomised, bare_randomised, torch_time = spent
    print(
        f"| {title} | {rank} | {exact:.3f} | {exact / bare_exact:.2f} | {randomised:.3f} "
        f"| {randomised / bare_randomised:.2f} | {exact / randomised:.2f} | {products} | {torch_time:.3f} "
        f"| {ours * 1e3:.3f} | {torchs * 1e3:.3f} |",
        flush=True,
    )


def print_head(what: str, repetitions: int) -> None:
    print(f"{_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__},")
    print(f"NumPy {numpy.__version__}; {what}, medians of {repetitions} interleaved rounds (1 from 2048 columns on)\n")
    head = ["matrix", "rank", "exact, CPU s", "of bare eigenvectors", "randomised, CPU s", "of bare products"]
    head += ["times as fast as exact", "products", "torch.svd_lowrank, CPU s", "energy missed, ‰", "torch's, ‰"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")


def random_matrix(shape: tuple[int, int], spectrum: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) if spectrum == "gaussian" else task_vector(shape, generator)


def print_sizes(shapes: list[tuple[int, int]], spectrum: str, repetitions: int) -> None:
    print_head("a Gaussian matrix" if spectrum == "gaussian" else "σᵢ ∝ i^-0.7", repetitions)
    for shape in shapes:
        matrix = random_matrix(shape, spectrum)
        products = products_taken(matrix)
        spent = seconds(matrix, products, repetitions if min(shape) < 2048 else 1)
        print_row(f"{shape[0]}×{shape[1]}", str(directions(matrix)[0]), spent, str(products), *missed(matrix))


def print_experts(base: Path, experts: list[Path], repetitions: int) -> None:
    """Print one row per expert: total seconds of its matrices, and the largest missed energy."""
    print_head("task vectors of real experts", repetitions)
    with open_checkpoint(base) as b:
        names = [name for name, info in b.tensors.items() if len(info.shape) == 2 and "embed" not in name]
        for expert in experts:
            with open_checkpoint(expert) as e:
                deltas = [e.read(name).float() - b.read(name).float() for name in names]
            deltas = [delta for delta in deltas if delta.any()]
            products = [products_taken(delta) for delta in deltas]
            spent = [seconds(delta, count, repetitions) for delta, count in zip(deltas, products, strict=True)]
            ours, torchs = (max(shares) for shares in zip(*map(missed, deltas), strict=True))
            total = [sum(column) for column in zip(*spent, strict=True)]
            title = f"{expert.resolve().name.rsplit('-', 1)[0]}, {len(deltas)} matrices"
            print_row(title, f"n/{SHARE}", total, f"{min(products)}–{max(products)}", ours, torchs)


def shape(text: str) -> tuple[int, int]:
    rows, columns = text.lower().replace("×", "x").split("x")
    return int(rows), int(columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=shape, nargs="+", default=SHAPES)
    parser.add_argument("--spectrum", choices=["task-vector", "gaussian"], default="task-vector")
    parser.add_argument("--base", type=Path)
    parser.add_argument("--experts", type=Path, nargs="+", default=[])
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    with single_threaded():
        if arguments.base is None:
            print_sizes(arguments.shapes, arguments.spectrum, arguments.repetitions)
        else:
            print_experts(arguments.base, arguments.experts, arguments.repetitions)


if __name__ == "__main__":
    main()
