"""What the formulas say of models and clusters that nobody here has: 70B and 405B on 1, 8 and 64 nodes.

    python -m benchmarks.scale            the tables of docs/explanation/scale.md

Nothing is measured: the costs are those of `merging/cost.py`, and every rate is an assumption, all of them below. The
rates of the kernels are those of one core of the machine that docs/explanation/scale.md names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.checkpoints import llama
from mergestream import OPCM, TIES, Average, Ledger, Method
from mergestream.ledger.readouts.agree import Agree
from mergestream.ledger.readouts.plain import Plain
from mergestream.merging.cost import Cost, absorbing, carrying, memory_of, nbytes, reading_entries, reading_state
from mergestream.merging.prediction import Rates, predict
from mergestream.methods.base import Context

# --- the assumptions

MODELS = {
    "70B": llama(80, hidden=8192, wide=28672, heads=64, key_value_heads=8, vocabulary=128256).tensors,
    "405B": llama(126, hidden=16384, wide=53248, heads=128, key_value_heads=8, vocabulary=128256).tensors,
}
"""Llama 3.1's, in bfloat16"""
for tensors in MODELS.values():
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
EXPERTS = 8
CORES, MEMORY = 64, 512e9
"""Of a node; a worker is one core, and there are no more than fit into its memory in the mean"""
BUSY = 1.5
"""Cores that share memory and clock take so much longer than one alone"""
KERNELS = {"product": 85e9, "product64": 38e9, "eigen": 28e9, "leading": 16e9, "orthonormal": 40e9, "svd": 30e9}
"""Operations a second of one core"""
ELEMENTS, TENSORS = 200e6, 2000.0
"""A second of one core"""


@dataclass(frozen=True)
class Storage:
    """Bytes a second that each node reads and writes, and that all nodes together can."""

    read: float
    write: float
    together: float
    waits_for: str

    def rates(self, nodes: int) -> tuple[float, float]:
        return min(self.read * nodes, self.together), min(self.write * nodes, self.together)


STORAGE = {
    "NVMe": Storage(6e9, 3e9, math.inf, "disk"),  # of each node, as a parallel file system shares them
    "NFS": Storage(1.2e9, 1.2e9, 1.2e9, "network"),  # one server, 10 Gb/s
    "S3": Storage(2.5e9, 2.5e9, 100e9, "network"),  # 25 Gb/s for each node
}
NODES = (1, 8, 64)

# --- what is done

METHODS: dict[str, Method] = {
    "opcm": OPCM(),
    "opcm, block": OPCM(projection="block"),
    "ledger": Ledger(),
    "average": Average(),
    "ties": TIES(mode="streaming"),
}


def contexts(model: str, t: int) -> Iterator[Context]:
    for name, shape in MODELS[model].items():
        yield Context(t, len(shape) == 2 and "embed" not in name, shape, tensor=name)


def adding(method: Method, context: Context) -> Cost:
    elements = math.prod(context.shape)
    return absorbing(method, context, 2 * 2 * elements, elements)


def exporting(method: Method, context: Context) -> Cost:
    base = 2 * math.prod(context.shape)
    if isinstance(method, Ledger):
        kept = method.directions(context, EXPERTS) or 0
        cost = reading_entries(Agree(), context, base, EXPERTS * nbytes(method.layout(context)), EXPERTS * kept)
    else:
        cost = reading_state(Plain(), context, base, nbytes(method.layout(context)), None)
    return dataclasses.replace(cost, writes=base)


def merging(method: Method, context: Context) -> Cost:
    base = 2 * math.prod(context.shape)
    return carrying(method, [dataclasses.replace(context, t=t) for t in (1, 2, 3)], base, 3 * base, base)


WORK: dict[str, tuple[Callable[[Method, Context], Cost], str]] = {
    **{f"`add`, {name}": (adding, name) for name in METHODS},
    "`export`, average": (exporting, "average"),
    f"`export`, ledger, {EXPERTS} by agree": (exporting, "ledger"),
    "`merge` of 3, ties": (merging, "ties"),
}


def told(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def cell(model: str, work: str, storage: Storage, nodes: int) -> str:
    cost_of, name = WORK[work]
    method, tensors = METHODS[name], list(contexts(model, EXPERTS))
    costs = [cost_of(method, context) for context in tensors]
    held = sum(cost.weight * memory_of(method, context) for cost, context in zip(costs, tensors, strict=True))
    workers = nodes * min(CORES, int(MEMORY * sum(cost.weight for cost in costs) / held))
    read, write = storage.rates(nodes)
    kernels = {kernel: {1: rate} for kernel, rate in KERNELS.items()}
    rates = Rates(read, write, math.inf, math.inf, ELEMENTS, TENSORS, kernels, BUSY)  # type: ignore[arg-type]
    said = predict(costs, rates, workers)
    moved = said.reading + said.writing
    if moved > said.computing + said.passing:
        return f"{told(said.seconds)}, {storage.waits_for}"
    even = BUSY * math.fsum(rates.seconds(part) for cost in costs for part in cost.work) / workers
    return f"{told(said.seconds)}, {'CPU' if said.computing <= even + said.passing else 'one tensor'}"


def print_tables() -> None:
    for model, tensors in MODELS.items():
        size = sum(map(math.prod, tensors.values()))
        print(f"\n**{model}** ({size / 1e9:.1f} billion parameters)\n")
        columns = [(place, nodes) for place in STORAGE for nodes in NODES]
        print(f"| | {' | '.join(f'{place}, {nodes}' for place, nodes in columns)} |\n|{'---|' * (len(columns) + 1)}")
        for work in WORK:
            cells = [cell(model, work, STORAGE[place], nodes) for place, nodes in columns]
            print(f"| {work} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    print_tables()
