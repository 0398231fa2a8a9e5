"""The minimal kernels of `add` and `export` in a ledger.

    python -m benchmarks.ledger add --base B EXPERT   base and expert are read; Δ of every tensor, its leading triplets
    python -m benchmarks.ledger export STORE          entries in memory; the products and eigenvectors of `agree`

All cores work on separate matrices, the largest first. Nothing is digested, checked or written.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.stopwatch import work
from mergestream.algebra.truncated import truncated_svd
from mergestream.checkpoints import open_checkpoint
from mergestream.engine import LocalEngine
from mergestream.engine.local import keep_freed_memory, single_threaded
from mergestream.ledger.method import FEWEST
from mergestream.ledger.readouts.agree import Agree
from mergestream.ledger.span import Product, Span
from mergestream.merging.entries import EntriesReading
from mergestream.store.store import Store

Job = TypeVar("Job")


def on_all_cores(jobs: Sequence[Job], run: Callable[[Job], object], size: Callable[[Job], int]) -> None:
    keep_freed_memory()
    with single_threaded(), ThreadPoolExecutor(os.cpu_count(), initializer=lambda: torch.set_num_threads(1)) as pool:
        for future in [pool.submit(run, job) for job in sorted(jobs, key=size, reverse=True)]:
            future.result()


def add_kernels(base: Path, expert: Path) -> dict[str, Tensor]:
    """Read both, subtract, and decompose every matrix as the ledger does; return the singular values it keeps."""
    found: dict[str, Tensor] = {}
    with open_checkpoint(base) as ours, open_checkpoint(expert) as theirs:

        def decompose(name: str) -> None:
            delta = theirs.read(name).float().sub_(ours.read(name).float())
            if delta.ndim == 2:
                found[name] = truncated_svd(delta, min(delta.shape) // FEWEST).s

        on_all_cores(list(ours.tensors), decompose, lambda name: math.prod(ours.tensors[name].shape))
    return found


def agree_kernels(span: Span, linear: bool) -> Tensor:
    """Return M = U Z Vᵀ of all experts with weights of 1; for other tensors than linear weights the sum."""
    span = replace(span, outputs=span.outputs.float(), inputs=span.inputs.float())
    return Product(span, Agree().coefficients(span) if linear else span.sigma, transposed=False).dense()


def spans(store: Path) -> list[tuple[Span, bool]]:
    """Load the directions of every matrix in their stored dtype, and whether it is a linear weight."""
    with Store(store).snapshot() as snapshot:
        reading = snapshot.reading(LocalEngine())
        assert isinstance(reading, EntriesReading)
        found = []
        for name in reading.directions:
            context = reading.contexts[name]
            spans = Span.of(reading.entries(name), torch.bfloat16, context.transposed)
            found += [(span, context.linear) for span in spans]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("add")
    command.add_argument("--base", type=Path, required=True)
    command.add_argument("expert", type=Path)
    command = commands.add_parser("export")
    command.add_argument("store", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "add":
        with work():
            add_kernels(arguments.base, arguments.expert)
        return
    jobs = spans(arguments.store)
    with work():
        on_all_cores(jobs, lambda job: agree_kernels(*job), lambda job: job[0].outputs.numel() + job[0].inputs.numel())


if __name__ == "__main__":
    main()
