"""What it costs that all that is read from a store is checked against its digest.

    python -m benchmarks.checking              a model of 200 MB
    python -m benchmarks.checking llama-1gb

The commands run as they are, and the time within the checks is measured beside the whole: both are CPU seconds, so that
they can be compared on a busy machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from benchmarks.cases import OUT, fresh, store_with
from benchmarks.checkpoints import MODELS, Family, family
from benchmarks.suite import STORES
from mergestream import OPCM, Average, Ledger
from mergestream.api import Store
from mergestream.digest import tensor_digest
from mergestream.methods.base import Method

EXPERTS = 3
METHODS: dict[str, Method] = {"average": Average(), "opcm, block": OPCM(projection="block"), "ledger": Ledger()}


@contextmanager
def checks_timed() -> Iterator[list[float]]:
    """The CPU seconds of every check within."""
    seconds: list[float] = []

    def timed(tensor: Tensor) -> str:
        started = time.thread_time()
        digest = tensor_digest(tensor)
        seconds.append(time.thread_time() - started)
        return digest

    with patch("mergestream.store.checked.tensor_digest", timed):
        yield seconds


def share(work: Callable[[], object]) -> str:
    """``1.25 s, of which 0.04 s (3.2 %) are checks``"""
    started = time.process_time()
    with checks_timed() as checks:
        work()
    whole = time.process_time() - started
    return f"{whole:.2f} s, of which {sum(checks):.2f} s ({sum(checks) / whole:.1%}) are checks"


def measure(models: Family, name: str, method: Method) -> None:
    store = Store(store_with(STORES / "checking", models, method, EXPERTS - 1))
    print(f"{models.model}, {name}, add: {share(lambda: store.add(models.experts[-1]))}", flush=True)
    out = fresh(OUT / "checked")
    print(f"{models.model}, {name}, export: {share(lambda: store.export(out, pictures=False))}", flush=True)
    fresh(store.path), fresh(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="The share of add and export that goes into checking digests.")
    parser.add_argument("model", nargs="?", choices=MODELS, default="llama-200mb")
    models = family(parser.parse_args().model, EXPERTS)
    for name, method in METHODS.items():
        measure(models, name, method)


if __name__ == "__main__":
    main()
