"""Cost of commands as a store fills with experts of a tiny model.

    python -m benchmarks.many_experts                    10, 100 and 500 experts, by opcm and in a ledger
    python -m benchmarks.many_experts --counts 10 50     other numbers

A store is filled once and copied at each number. Every command runs in a separate process. Ratios are relative to the
first number, of CPU seconds (which other load hardly changes) and of peak anonymous memory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.measure import Cost, disk_bytes, run
from mergestream import OPCM, Store
from mergestream.engine.local import single_threaded
from mergestream.ledger.method import Ledger
from mergestream.methods.base import Method

METHODS: dict[str, Method] = {"opcm": OPCM(), "ledger": Ledger()}


def tiny_model(seed: int = 0) -> dict[str, Tensor]:
    """Make a model of about 5,000 parameters; an expert is a slightly changed base."""
    drawn = torch.Generator().manual_seed(0)
    base = {f"layers.{i}.{part}.weight": torch.randn(24, 32, generator=drawn) for i in range(3) for part in "ab"}
    base |= {f"layers.{i}.norm.weight": torch.randn(32, generator=drawn) for i in range(3)}
    moved = torch.Generator().manual_seed(seed)
    return {name: one + (0.01 * torch.randn(one.shape, generator=moved) if seed else 0) for name, one in base.items()}


def save_model(directory: Path, seed: int) -> Path:
    directory.mkdir(parents=True)
    save_file(tiny_model(seed), directory / "model.safetensors")
    return directory


def stores(place: Path, method: Method, counts: Sequence[int]) -> Iterator[tuple[int, Path]]:
    """Make a store for each number of experts."""
    store = Store.create(place / "store", save_model(place / "base", 0), method)
    with single_threaded():
        for number in range(1, max(counts) + 1):
            store.add(save_model(place / f"expert-{number}", number))
            if number in counts:
                yield number, Path(shutil.copytree(store.path, place / f"store-{number}"))


def commands(place: Path, store: Path) -> dict[str, list[str | Path]]:
    new = place / "new"
    if not new.exists():
        save_model(new, 10**6)
    out = store.with_name(f"{store.name}-out")
    return {
        "status": ["status", store],
        "log": ["log", store],
        "report html": ["report", store, "-o", f"{out}.html"],
        "report md": ["report", store, "-o", f"{out}.md"],
        "report json": ["report", store, "-o", f"{out}.json"],
        "export": ["export", store, out],
        "inspect": ["inspect", store, new],
        "add": ["add", store, new],
    }


def measure(counts: Sequence[int], methods: Sequence[str]) -> None:
    for method in methods:
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch)
            first: dict[str, Cost] = {}
            for count, store in stores(place, METHODS[method], counts):
                record = disk_bytes(store / "experts") / count
                print(f"\n{method}, {count} experts, a record of {record / 1e3:.0f} kB each")
                for what, words in commands(place, store).items():
                    cost = run([sys.executable, "-m", "mergestream", *words, *_quiet(what)])
                    before = first.setdefault(what, cost)
                    print(
                        f"{what:12} {cost.wall:7.2f} s  {cost.cpu:7.2f} s CPU (×{cost.cpu / before.cpu:.2f})  "
                        f"{cost.anonymous / 1e6:6.0f} MB (×{cost.anonymous / before.anonymous:.2f})",
                        flush=True,
                    )


def _quiet(what: str) -> list[str]:
    return [] if what in ("status", "log") else ["--quiet"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    measure(arguments.counts, arguments.methods)


if __name__ == "__main__":
    main()
