"""Memory of `add` and `export` for models of growing size and for many experts.

    python -m benchmarks.memory                                     all: 200 MB to 4 GB, and up to 20 experts
    python -m benchmarks.memory --models llama-200mb llama-1gb --experts 3

Every `add` and `export` is a command in a separate process. Its peak of anonymous memory (RssAnon,
sampled every 30 ms) excludes mapped files, which the kernel can drop. The models differ only in depth,
so the largest tensor is the same. `status` is the same interpreter without torch.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.checkpoints import CACHE, MODELS, Family, family
from benchmarks.measure import run
from benchmarks.report import machine

SIZES = ("llama-200mb", "llama-1gb", "llama-4gb")
COLUMNS = ("method", "model", "size", "largest tensor", "command", "expert", "peak anonymous", "seconds")


class Row(NamedTuple):
    method: str
    model: str
    command: str
    expert: int
    anonymous: int
    wall: float

    def cells(self) -> tuple[str, ...]:
        shape = MODELS[self.model]
        sizes = [math.prod(tensor) * shape.dtype.itemsize for tensor in shape.tensors.values()]
        size, largest = f"{sum(sizes) / 1e6:.0f} MB", f"{max(sizes) / 1e6:.0f} MB"
        peak, seconds = f"{self.anonymous / 1e6:.0f} MB", f"{self.wall:.1f}"
        return self.method, self.model, size, largest, self.command, str(self.expert), peak, seconds


def measure(experts: Family, method: str, workers: int, place: Path) -> Iterator[Row]:
    """Add one expert after the other to a new store, then export."""
    shutil.rmtree(place, ignore_errors=True)
    store, out = place / "store", place / "merged"
    command = (sys.executable, "-m", "mergestream")
    run((*command, "init", store, "--base", experts.base, "--method", method, "--workers", str(workers)))
    for number, expert in enumerate(experts.experts, start=1):
        cost = run((*command, "add", store, expert, "--workers", str(workers)))
        if number > 1:
            yield Row(method, experts.model, "add", number, cost.anonymous, cost.wall)
    cost = run((*command, "export", store, out, "--workers", str(workers)))
    yield Row(method, experts.model, "export", len(experts.experts), cost.anonymous, cost.wall)
    cost = run((*command, "status", store))
    yield Row(method, experts.model, "status", len(experts.experts), cost.anonymous, cost.wall)
    shutil.rmtree(place)


def print_row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak anonymous memory of add and export.")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=SIZES, help="the first takes all experts, the others two"
    )
    parser.add_argument("--experts", type=int, default=20, help="how many the first model takes")
    parser.add_argument("--methods", nargs="+", default=["opcm", "average"])
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()), f"workers {arguments.workers}", sep=", ")
    print()
    print_row(COLUMNS)
    print_row(["---"] * len(COLUMNS))
    for method in arguments.methods:
        for model in arguments.models:
            count = arguments.experts if model == arguments.models[0] else min(2, arguments.experts)
            for row in measure(family(model, count), method, arguments.workers, CACHE / "stores" / "memory"):
                print_row(row.cells())


if __name__ == "__main__":
    main()
