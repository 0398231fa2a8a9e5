"""`add`, `export` and `merge` on two of Llama-7B's 32 layers, compared with mergekit and the minimal kernels.

    python -m benchmarks.large                        writes large.md; half an hour on two quiet cores
    python -m benchmarks.large --only opcm ledger     some of it, to the screen

Hidden 4096, intermediate 11008, bfloat16, in shards. The vocabulary has 4096 rows, so sixteen such models have as many
rows as the two embeddings of the 7B. Numbers for 32 layers are extrapolated: sixteen times the measured ones. Our runs
get ``--max-memory 4GB`` and fail if they need more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks import cases
from benchmarks.cases import FLOOR, KERNELS, MERGEKIT, OUT, Case, Contender
from benchmarks.checkpoints import MODELS, Family, family
from benchmarks.measure import ROOT, Cost
from benchmarks.report import described, machine, table
from benchmarks.suite import STORES
from mergestream import OPCM, Ledger, TaskArithmetic
from mergestream.methods.base import Method
from mergestream.sizes import parse_size

MODEL, LAYERS = "llama-7b-2-layers", 32
WITHIN = "4GB"


def stored(experts: Family, method: Method, number: int, label: str) -> tuple[Path, Contender, Contender]:
    """Return a store, the `add` of expert `number` to it, and the `export` of all."""
    store = cases.store_with(STORES / MODEL, experts, method, number - 1)
    return (
        store,
        cases.add(store, experts.experts[number - 1], number - 1, label=f"{label}, add", within=WITHIN),
        cases.export(store, OUT / "exported", label=f"{label}, export of {number}", within=WITHIN),
    )


def opcm(experts: Family) -> Iterator[Contender]:
    for projection in ("reference", "block"):
        _, add, export = stored(experts, OPCM(projection=projection), 2, f"OPCM, {projection}")
        yield from (add, cases.kernels(experts, projection, label=f"{KERNELS} of OPCM, {projection}, add"), export)


def ledger(experts: Family) -> Iterator[Contender]:
    store, add, export = stored(experts, Ledger(), 3, "ledger")
    yield from (add, cases.ledger_add_kernels(experts.base, experts.experts[2], label=f"{KERNELS} of the ledger, add"))
    yield from (export, cases.ledger_export_kernels(store, label=f"{KERNELS} of the ledger, export of 3"))


def sums(experts: Family) -> Iterator[Contender]:
    yield from stored(experts, TaskArithmetic(), 3, "task arithmetic")[1:]
    for method, label, *parameters in (
        ("task_arithmetic", "task arithmetic", "scale=0.3"),
        ("ties", "TIES", "mode=streaming", "density=0.2", "scale=1"),
    ):
        yield cases.merge(experts, method, *parameters, label=f"{label}, merge of 3", within=WITHIN)
        if cases.have_peers():
            yield cases.mergekit(experts, method, label=f"{MERGEKIT}, {label} of 3")
    yield cases.floor((experts.base, *experts.experts), experts.base, label=f"{FLOOR} of a merge of 3")


PARTS: dict[str, Callable[[Family], Iterator[Contender]]] = {"opcm": opcm, "ledger": ledger, "sums": sums}


def measure(parts: Iterable[str]) -> dict[Contender, Cost]:
    experts, measured = family(MODEL, 3), {}
    for part in parts:
        for contender in PARTS[part](experts):
            ((measured[contender],),) = Case(MODEL, (contender,)).measure(1, 1).values()
            cases.fresh(OUT)
        cases.fresh(STORES)
    return measured


def row(name: str, cost: Cost) -> tuple[str, ...]:
    times = LAYERS / MODELS[MODEL].config["num_hidden_layers"]
    seconds = [cost.work[clock] for clock in ("wall", "cpu")]
    extrapolated = (f"{second * times / 60:.1f}" for second in seconds)
    return name, *(f"{second:.1f}" for second in seconds), f"{cost.anonymous / 1e6:.0f}", *extrapolated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[], help="some parts, to the screen")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "performance" / "large.md")
    arguments = parser.parse_args()
    about = machine()
    measured = measure(arguments.only or PARTS)
    head = ["work", "wall (s)", "CPU (s)", "anonymous (MB)"]
    head += [f"{LAYERS} layers, extrapolated: {clock} (min)" for clock in ("wall", "CPU")]
    lines = table(head, [row(contender.name, cost) for contender, cost in measured.items()])
    text = "\n".join([f"{described(about)}. Everything once.", "", *lines, ""])
    print(text)
    if not arguments.only:
        arguments.output.write_text(text)
    above = [who.name for who, cost in measured.items() if who.is_ours and cost.anonymous > parse_size(WITHIN)]
    if above:
        sys.exit(f"more than {WITHIN} of memory: {'; '.join(above)}")


if __name__ == "__main__":
    main()
