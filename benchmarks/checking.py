"""Cost of checking digests when a store is read.

    python -m benchmarks.checking              a model of 200 MB
    python -m benchmarks.checking llama-1gb

Every round runs a command with and without the checks. CPU seconds are compared, so a busy
machine hardly matters.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from unittest.mock import patch

from benchmarks.cases import OUT, back_to, fresh, store_with
from benchmarks.checkpoints import MODELS, Family, family
from benchmarks.suite import STORES
from mergestream import OPCM, Average, Ledger
from mergestream.methods.base import Method
from mergestream.store.store import Store
from mergestream.store.tensors import CheckedTensors

EXPERTS = 3
METHODS: dict[str, Method] = {"average": Average(), "opcm, block": OPCM(projection="block"), "ledger": Ledger()}


def compared(prepare: Callable[[], object], work: Callable[[], object], rounds: int) -> str:
    """Compare the medians: ``0.62 s with checks, 0.55 s without: 13 % more``."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for checked, found in seconds.items():
            prepare()
            unchecked = patch.object(CheckedTensors, "read", lambda self, name: self._owner[name].read(name))
            with nullcontext() if checked else unchecked:
                started = time.process_time()
                work()
                found.append(time.process_time() - started)
    with_checks, without = median(seconds[True]), median(seconds[False])
    return f"{with_checks:.2f} s with checks, {without:.2f} s without: {with_checks / without - 1:.1%} more"


def measure(models: Family, name: str, method: Method, rounds: int) -> None:
    path, out, title = STORES / "checking", OUT / "checked", f"{models.model}, {name}"
    store = Store(store_with(path, models, method, EXPERTS - 1))
    export = compared(lambda: fresh(out), lambda: store.export(out), rounds)
    print(f"{title}, export: {export}", flush=True)
    added = compared(lambda: back_to(path, EXPERTS - 1), lambda: store.add(models.experts[-1]), rounds)
    print(f"{title}, add: {added}", flush=True)
    fresh(path), fresh(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of digest checks in export and add.")
    parser.add_argument("model", nargs="?", choices=MODELS, default="llama-200mb")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    models = family(options.model, EXPERTS)
    for name, method in METHODS.items():
        measure(models, name, method, options.rounds)


if __name__ == "__main__":
    main()
