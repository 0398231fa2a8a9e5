"""Accuracy of all experts of the `language` suite when served from one store and one copy of the base.

    python -m benchmarks.serving -o docs/results/language

Adds the adapters to a ledger, exports them again (`--format loras`) and the merged one (`--format lora`), loads all
into one model with PEFT, scores each on its own task and compares it with the original adapter; counts the bytes.
Writes DIR/serving.json and .md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.suites.language import SUITE, LanguageSuite
from examples.serving import serve
from mergestream import Store
from mergestream.escaping import markdown_table as table
from mergestream.files import write_json, write_text


def serving(suite: LanguageSuite, place: Path) -> dict[str, Any]:
    store = Store.create(place / "store", base=suite.base())
    for task in suite.tasks:
        store.add(suite.expert(task), name=task)
    adapters = serve.write_adapters(store, place / "adapters")
    served = serve.load(suite.base(), adapters)
    scores: dict[str, dict[str, float]] = {}
    switching = 0.0
    for task in suite.tasks:
        alone = suite.accuracy(suite.expert(task), task)
        started = time.perf_counter()
        served.set_adapter(task)
        switching += time.perf_counter() - started
        scores[task] = {"expert": alone, "served": suite.score(served, task)}
        print(f"{task}: {scores[task]}", file=sys.stderr)
    served.set_adapter(serve.MERGED)
    for task in suite.tasks:
        scores[task]["merged"] = suite.score(served, task)
    return {
        "scores": scores,
        "milliseconds_to_switch": 1000 * switching / len(suite.tasks),
        "bytes": serve.sizes(store, suite.base(), adapters),
    }


def described(found: dict[str, Any]) -> str:
    scores = found["scores"]
    kinds = list(next(iter(scores.values())))
    rows = [[task, *(f"{100 * of[kind]:.1f}" for kind in kinds)] for task, of in scores.items()]
    means = ["mean", *(f"{100 * mean(of[kind] for of in scores.values()):.1f}" for kind in kinds)]
    sizes = [[what, f"{count / 1e6:.1f} MB"] for what, count in found["bytes"].items()]
    return "\n".join(
        [
            *table(["task", *kinds], [*rows, means]),
            "",
            *table(["kept as", "bytes"], sizes),
            "",
            f"Switching to another expert takes {found['milliseconds_to_switch']:.1f} ms.",
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        found = serving(SUITE, Path(place))
    write_json(options.output / "serving.json", found)
    write_text(options.output / "serving.md", described(found))
    print(described(found))


if __name__ == "__main__":
    main()
