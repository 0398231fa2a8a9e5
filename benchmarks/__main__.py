"""Measure mergestream, its peers and the limits in one run.

    python -m benchmarks            everything: about an hour on two quiet cores
    python -m benchmarks --quick    one small model of each kind, the peers once: under three minutes

Peers are measured if `make peers` has installed them. Writes results.md and results.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import report
from benchmarks.cases import have_peers
from benchmarks.checkpoints import CACHE
from benchmarks.measure import ROOT
from benchmarks.suite import Suite, announce


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure mergestream, its peers and the limits in one run.")
    parser.add_argument("--quick", action="store_true", help="one small model of each kind, the peers once")
    parser.add_argument("--output", type=Path, help="directory for results.md and results.json")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    output = arguments.output or (CACHE / "quick" if arguments.quick else ROOT / "docs" / "results" / "performance")

    suite = Suite(arguments.repetitions, peer_repetitions=1 if arguments.quick else arguments.repetitions)
    about = report.machine()
    for model in ["vit-b-32"] if arguments.quick else ["vit-b-32", "vit-l-14"]:
        announce(f"OPCM, {model}")
        suite.opcm(model)
    for model in ["llama-200mb"] if arguments.quick else ["llama-1gb", "llama-4gb"]:
        announce(f"sums and TIES, {model}")
        suite.sums(model)
    if have_peers():
        announce("agreement with mergekit")
        suite.agreement_with_mergekit()
    suite.startup()
    print(report.write(output, suite, about))


if __name__ == "__main__":
    main()
