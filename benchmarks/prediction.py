"""Compare the time that `inspect` predicts for an `add` with the measured one.

    python -m benchmarks.prediction                                       five sizes of model, several methods
    python -m benchmarks.prediction --models llama-tiny --methods ledger

The second expert is inspected, then added. Run it on a machine with constant load. The last line has the smallest, the
median and the largest ratio.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.checkpoints import CACHE, MODELS, Family, family
from benchmarks.report import machine
from mergestream import OPCM, TIES, Average, Ledger, MagMax, Method, Store
from mergestream.engine import LocalEngine
from mergestream.progress import Progress

SIZES = ("llama-tiny", "llama-1024", "vit-b-32", "llama-200mb", "llama-7b-2-layers")
METHODS: dict[str, Method] = {
    "opcm": OPCM(),
    "opcm, block": OPCM(projection="block"),
    "ledger": Ledger(),
    "average": Average(),
    "magmax": MagMax(),
    "ties": TIES(mode="streaming"),
}
SLOW = {"opcm", "opcm, block"}
"""Skipped for the largest model, where they take minutes per matrix"""


def ratios(models: Family, methods: list[str], place: Path) -> Iterator[float]:
    """Print predicted and measured seconds of each method; returns their ratios."""
    for name in (name for name in methods if not (models.model == SIZES[-1] and name in SLOW)):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        store = Store.create(place / "store", models.base, METHODS[name], engine=LocalEngine(), progress=Progress())
        store.add(models.experts[0])
        predicted = store.inspect(models.experts[1]).seconds
        started = time.monotonic()
        store.add(models.experts[1])
        took = time.monotonic() - started
        print(f"| {models.model} | {name} | {predicted:.2f} | {took:.2f} | {predicted / took:.2f} |", flush=True)
        yield predicted / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=SIZES)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--cache", type=Path, default=CACHE)
    arguments = parser.parse_args()
    place = arguments.cache / "stores" / "prediction"
    print(", ".join(f"{key} {value}" for key, value in machine().items()), end="\n\n")
    print("| model | method | inspect says, s | the add took, s | ratio |\n|---|---|---|---|---|")
    families = (family(model, 3, arguments.cache) for model in arguments.models)
    found = [ratio for models in families for ratio in ratios(models, arguments.methods, place)]
    within = sum(1 / 1.5 <= ratio <= 1.5 for ratio in found)
    print(f"\nratios from {min(found):.2f} to {max(found):.2f}, ", end="")
    print(f"median {statistics.median(found):.2f}; {within} of {len(found)} within a factor of 1.5")
    shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
