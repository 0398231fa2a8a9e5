"""Growth of a ledger with 1 … 40 experts: bytes on disk, and time and memory of every `add`.

    python -m benchmarks.ledger_growth            measure and plot: about five minutes on two quiet cores
    python -m benchmarks.ledger_growth --plot     plot earlier measurements

Every `add` is one run in a separate process. Writes ledger-growth.json and ledger-growth.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import cases, report
from benchmarks.checkpoints import CACHE, MODELS, family
from benchmarks.growth import RESULTS
from benchmarks.measure import disk_bytes, run
from mergestream import Ledger
from mergestream.base.model import BaseModel
from mergestream.ledger.method import FEWEST
from mergestream.merging.plan import tensor_contexts
from mergestream.store.store import Store

MODEL, MANY = "llama-tiny", 40
STORE = CACHE / "ledger-growth"


@dataclass(frozen=True)
class Point:
    experts: int
    disk: int
    """Bytes of all files of the store"""
    entries: int
    """Bytes of the entries; the other files take half a megabyte per expert for any model"""
    read: int
    """Bytes of the entries that a readout uses, by the rank rule"""
    wall: float
    cpu: float
    anonymous: int


def points(model: str, many: int) -> Iterator[Point]:
    """Add one expert after the other to a new store."""
    experts = family(model, many)
    cases.store_with(STORE, experts, Ledger(), 0)
    base = Store(STORE).manifest.base
    for number, expert in enumerate(experts.experts, start=1):
        cost = run(cases.add(STORE, expert, number - 1).command)
        sizes = disk_bytes(STORE), disk_bytes(STORE / "steps"), entries_bytes(base, Ledger(), number)
        yield Point(number, *sizes, cost.work["wall"], cost.work["cpu"], cost.anonymous)
    cases.fresh(STORE)


def entries_bytes(base: BaseModel, method: Ledger, experts: int) -> int:
    """Return the bytes of `count` entries, each cut to its share of the budget."""
    entry, contexts = 0, tensor_contexts(base, experts)
    for name in base.merged:
        others = (method.wanted_rank(contexts[name]),) * (experts - 1)
        slots = method.layout(dataclasses.replace(contexts[name], others=others)).values()
        entry += sum(math.prod(slot.shape) * slot.dtype.itemsize for slot in slots)
    return experts * entry


def base_bytes(model: str) -> int:
    """Return the bytes of the base in float32."""
    return 4 * sum(map(math.prod, MODELS[model].tensors.values()))


def plot(measured: Sequence[Point], model: str, directory: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bytes_axis, cost_axis) = pyplot.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    experts, base = [point.experts for point in measured], base_bytes(model)
    lines: dict[str, tuple[str, list[int]]] = {
        "entries on disk": ("C0o-", [point.entries for point in measured]),
        "the same with half a megabyte of records an expert": ("C7-", [point.disk for point in measured]),
        "what is read of the entries: the rank rule": ("C1--", [point.read for point in measured]),
        "twice that": ("C2:", [2 * point.read for point in measured]),
    }
    for label, (style, sizes) in lines.items():
        bytes_axis.plot(experts, [size / base for size in sizes], style, markersize=4, label=label)
    bytes_axis.axvline(FEWEST, color="grey", linewidth=0.8)
    bytes_axis.annotate(f"{FEWEST}: from here on experts share the room", (FEWEST + 0.4, 0.03), fontsize=8)
    bytes_axis.set(xlabel="experts", ylabel="bytes of the store, of the base's in float32", ylim=(0, 2.2))
    bytes_axis.legend(fontsize=8, loc="upper left")
    cost_axis.plot(experts, [point.cpu for point in measured], "o-", markersize=4, label="add, CPU seconds")
    memory_axis = cost_axis.twinx()
    memory = [point.anonymous / 1e6 for point in measured]
    memory_axis.plot(experts, memory, "s--", markersize=3, color="C1", label="add, peak anonymous memory")
    cost_axis.set(xlabel="experts", ylabel="CPU seconds", ylim=(0, None))
    memory_axis.set(ylabel="MB", ylim=(0, 1.5 * max(memory)))
    drawn = [*cost_axis.get_lines(), *memory_axis.get_lines()]
    cost_axis.legend(drawn, [str(line.get_label()) for line in drawn], fontsize=8)
    for axis in (bytes_axis, cost_axis):
        axis.grid(alpha=0.3)
    figure.suptitle(f"A ledger of {model}", fontsize=10)
    figure.savefig(directory / "ledger-growth.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a ledger takes with 1 … 40 experts.")
    parser.add_argument("--plot", action="store_true", help="plot earlier measurements")
    parser.add_argument("--model", choices=MODELS, default=MODEL)
    parser.add_argument("--experts", type=int, default=MANY)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = arguments.output / "ledger-growth.json"
    if not arguments.plot:
        about, measured = report.machine(), []
        for point in points(arguments.model, arguments.experts):
            measured.append(asdict(point))
            facts = {"machine": about, "model": arguments.model, "base": base_bytes(arguments.model)}
            results.write_text(json.dumps({**facts, "points": measured}, indent=1) + "\n")
            disk = (
                f"{point.disk / 1e6:.1f} MB, entries {point.entries / 1e6:.1f} MB, {point.read / 1e6:.1f} MB are read"
            )
            cost = f"{point.cpu:.2f} s CPU, {point.anonymous / 1e6:.0f} MB"
            print(f"{point.experts}: {disk}, {cost}", file=sys.stderr, flush=True)
    facts = json.loads(results.read_text())
    plot([Point(**point) for point in facts["points"]], facts["model"], arguments.output)


if __name__ == "__main__":
    main()
