"""The readouts of a ledger against the same formulas in float64: CPU seconds, ratio and error.

    python -m benchmarks.readouts                            8 experts, square and oblong weights
    python -m benchmarks.readouts --shapes 4096x4096 --experts 4

Both compute M from the same entries on one thread, in turns: the readouts of mergestream, and their formulas as they
were computed until 0.3.0, with Gram matrices, eigenvectors and κ×κ products in float64, and M = U Z Vᵀ in float32.
The limit is one Gram matrix in float32 and M = U Z Vᵀ alone. The error is relative to M in float64.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mergestream.algebra.products import gram
from mergestream.algebra.symmetric import leading_eigenvectors
from mergestream.engine import single_threaded
from mergestream.ledger.readouts import READOUTS
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.ledger.span import Entry, Product, Span

LENGTH = 1.5
"""Of `outputs`"""


def make_span(m: int, n: int, experts: int, decay: float) -> Span:
    """Entries with random directions and σᵢ ∝ i^-decay, of another norm for every expert."""
    count = min(m, n) // experts
    generator, entries = torch.Generator().manual_seed(0), []
    for number in range(experts):
        left, right = (torch.linalg.qr(torch.randn(size, count, generator=generator)).Q.T for size in (m, n))
        sigma = (1 + number) * torch.arange(1, count + 1, dtype=torch.float64) ** -decay
        slots = {"left": left.bfloat16(), "sigma": sigma, "right": right.bfloat16()}
        entries.append(Entry({**slots, "norm2": 1.3 * sigma.square().sum()}))
    return next(iter(Span.of(entries, torch.float32, transposed=False)))


def power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = leading_eigenvectors(matrix.clone())
    return (vectors * values.pow(exponent)) @ vectors.T


def agree(span: Span, inner: Tensor) -> Tensor:
    answer = span.weight * span.sigma.square() / span.norm2
    g = answer.sqrt()
    values, E = leading_eigenvectors(g[:, None] * inner * g, effective_rank)
    values = values[: E.shape[1]]
    F = g[:, None] * E / values.sqrt()
    inside = inner @ F
    agreed = (answer * span.sigma)[:, None] * inside / values
    return torch.diag(span.weighted).addmm_(agreed - span.weighted[:, None] * inside, F.T)


def effective_rank(values: Tensor) -> int:
    return math.ceil(float(values.sqrt().sum().square() / values.sum()))


def outputs(span: Span) -> Tensor:
    outer, inner = gram(span.outputs.T), gram(span.inputs.T)
    Z = agree(span.reversed, outer).T
    return Z * (LENGTH * span.mean_norm / (Z * (outer @ Z @ inner)).sum().sqrt())


def tsv(span: Span) -> Tensor:
    return (power(gram(span.outputs.T), -0.5) * span.weighted) @ power(gram(span.inputs.T), -0.5)


def iso(span: Span) -> Tensor:
    outer, inner = gram(span.outputs.T), gram(span.inputs.T)
    half = span.weighted[:, None] * power(inner, 0.5)
    squares, vectors = leading_eigenvectors(half.T @ outer @ half)
    sigma = squares.sqrt()
    return sigma.mean() * half @ (vectors / sigma) @ (vectors.T @ power(inner, -0.5))


FORMULAS: dict[str, Callable[[Span], Tensor]] = {
    "agree": lambda span: agree(span, gram(span.inputs.T)),
    "outputs": outputs,
    "tsv": tsv,
    "iso": iso,
}


def table(m: int, n: int, experts: int, decay: float, repetitions: int) -> None:
    print(f"| {m}×{n}, {experts} experts | CPU ms | of float64 | of the limit | error | error of float64's |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in FORMULAS:
        rounds = [one_round(name, make_span(m, n, experts, decay)) for _ in range(repetitions)]
        before, took, least = (
            statistics.median(column) for column in zip(*(found for found, _ in rounds), strict=True)
        )
        errors = " | ".join(f"{error:.0e}" for error in rounds[0][1])
        print(f"| {name} | {took * 1e3:.0f} | {took / before:.2f} | {took / least:.2f} | {errors} |", flush=True)
    print()


def one_round(name: str, span: Span) -> tuple[list[float], list[float]]:
    """CPU seconds of the formula in float64, of ours and of the limit; the errors of ours and of the former."""
    readout, formula = READOUTS[name](), FORMULAS[name]
    assert isinstance(readout, EntriesReadout)
    runs: list[Callable[[], Tensor]] = [
        lambda: Product(span, formula(span), False).dense(),
        lambda: Product(span, readout.coefficients(span), False).dense(),
        lambda: Product(span, gram(span.inputs.T, span.inputs.dtype), False).dense(),
    ]
    seconds, merged = [], []
    for run in runs:
        started = time.thread_time()
        merged.append(run())
        seconds.append(time.thread_time() - started)
    exact = span.outputs.T.double() @ formula(span) @ span.inputs.double()
    return seconds, [float((M - exact).norm() / exact.norm()) for M in (merged[1], merged[0])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["768x768", "3072x768", "768x3072", "2048x2048"])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--decay", type=float, default=0.7, help="of the singular values")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    with single_threaded():
        for shape in arguments.shapes:
            m, n = map(int, shape.split("x"))
            table(m, n, arguments.experts, arguments.decay, arguments.repetitions)


if __name__ == "__main__":
    main()
