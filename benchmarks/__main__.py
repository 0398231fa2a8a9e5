"""Measure mergestream, its peers and the limits in one run.

    python -m benchmarks                                  everything: about an hour on two quiet cores
    python -m benchmarks --quick                          small models, everything once: under three minutes
    python -m benchmarks --opcm vit-b-32 --sums llama-1gb chosen models only

Peers are measured if `make peers` has installed them. Writes results.md and results.json.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.cases import OUT, have_peers
from benchmarks.checkpoints import CACHE, MODELS
from benchmarks.measure import ROOT
from benchmarks.suite import STORES, Suite, announce


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure mergestream, its peers and the limits in one run.")
    parser.add_argument("--quick", action="store_true", help="small models, everything once, into the cache")
    parser.add_argument("--opcm", nargs="*", choices=MODELS, default=["vit-b-32", "vit-l-14"], metavar="MODEL")
    parser.add_argument("--sums", nargs="*", choices=MODELS, default=["llama-1gb", "llama-4gb"], metavar="MODEL")
    parser.add_argument("--ledger", nargs="*", choices=MODELS, default=["llama-1gb"], metavar="MODEL")
    parser.add_argument("--ledger-memory", nargs="*", choices=MODELS, default=["llama-200mb"], metavar="MODEL")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peer-repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "performance")
    arguments = parser.parse_args()
    if arguments.quick:
        quick = {"opcm": ["vit-b-32"], "sums": ["llama-200mb"], "output": CACHE / "quick"}
        quick |= {"ledger": ["llama-tiny"], "ledger_memory": []}
        vars(arguments).update(quick, repetitions=1, peer_repetitions=1)

    suite = Suite(arguments.repetitions, arguments.peer_repetitions)
    about = report.machine()
    parts: dict[str, Callable[[], None]] = {}
    parts |= {f"OPCM, {model}": partial(suite.opcm, model) for model in arguments.opcm}
    parts |= {f"sums and TIES, {model}": partial(suite.sums, model) for model in arguments.sums}
    experts = 3 if arguments.quick else 8
    parts |= {f"ledger, {model}": partial(suite.ledger, model, experts) for model in arguments.ledger}
    parts |= {f"memory of a ledger, {model}": partial(suite.ledger_memory, model) for model in arguments.ledger_memory}
    if have_peers() and arguments.sums:
        parts["agreement with mergekit"] = suite.agreement_with_mergekit
    if arguments.opcm or arguments.sums:
        parts["startup"] = suite.startup
    for name, measure in parts.items():
        announce(name)
        measure()
        text = report.write(arguments.output, suite, about)  # after each: the next may find the disk full
        for directory in (STORES, OUT):
            shutil.rmtree(directory, ignore_errors=True)
    print(text)


if __name__ == "__main__":
    main()
