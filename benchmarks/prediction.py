"""What was predicted of a command beside what it then took, for five sizes of model and several methods.

    python -m benchmarks.prediction                                       the table of docs/explanation/scale.md
    python -m benchmarks.prediction --models llama-tiny --methods ledger
    python -m benchmarks.prediction --inspect                             what `inspect` says of an `add`

The second expert is added to a store, the store is exported, and three experts are merged in one go. Just before each,
the rates of the machine are measured and the time is predicted from the headers alone (`merging/prediction.py`). The
machine must not become busier or quieter meanwhile: the least, the middle and the largest of all ratios stand below.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from benchmarks.checkpoints import CACHE, MODELS, Family, family
from benchmarks.report import machine
from mergestream import OPCM, TIES, Average, Ledger, MagMax, Method, Store, TaskArithmetic, merge
from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from mergestream.digest import TensorHasher
from mergestream.engine import LocalEngine
from mergestream.experts import make_task_vector
from mergestream.export.source import ExpertsSource
from mergestream.merging.prediction import FLUSHES, Estimate, Sample, Stopwatch, measured_rates, predict
from mergestream.merging.reading import StateReading
from mergestream.merging.step import Step
from mergestream.merging.thresholds import find_thresholds
from mergestream.progress import Progress
from mergestream.store.arrival import Arrival

SIZES = ("llama-tiny", "llama-1024", "vit-b-32", "llama-200mb", "llama-7b-2-layers")
METHODS: dict[str, Method] = {
    "opcm": OPCM(),
    "opcm, block": OPCM(projection="block"),
    "ledger": Ledger(),
    "average": Average(),
    "magmax": MagMax(),
    "ties": TIES(mode="streaming"),
}
ONE_SHOT: dict[str, Method] = {"task arithmetic": TaskArithmetic(), "ties": TIES(mode="streaming")}
SLOW = {"opcm", "opcm, block"}
"""Left out of the largest model: minutes for each of its matrices"""


class Row(NamedTuple):
    model: str
    work: str
    predicted: Estimate
    seconds: float
    processor: float

    @property
    def ratio(self) -> float:
        return self.predicted.seconds / self.seconds

    @property
    def processor_ratio(self) -> float:
        return self.predicted.processor / self.processor


def adding(store: Store, expert: Path) -> Estimate:
    with Arrival(store, expert, partial=False, ignore=(), measured=False) as arrival:
        return arrival.predicted()


def exporting(store: Store, place: Path) -> Estimate:
    engine, method = store.engine, store.method
    spoken = Average() if method.remembers_experts else method  # elements go by alike
    with store.snapshot() as snapshot, store.open_base() as base:
        reading = snapshot.reading(engine)
        costs = [
            dataclasses.replace(reading.cost(tensor.tied_to or name), writes=tensor.nbytes)
            for name, tensor in reading.model.tensors.items()
        ]
        rates = measured_rates(
            costs, lambda sample: reading_out(sample, spoken), reading.model, engine.workers, [base], place
        )
    return predict(costs, rates, engine.workers, FLUSHES["export"])


def reading_out(sample: Sample, method: Method) -> Callable[[], object]:
    """What reading out the state after two models does to its elements."""
    state = sample.absorbed(method, 1, sample.absorbed(method, 0, None))
    reading = StateReading(sample.model, method, 2, state.read, 1.0, 1.0)
    return lambda: speak(sample, lambda name, dtype: reading.pieces(name, sample.base, 1.0, dtype))


def merging(models: Family, method: Method, engine: LocalEngine, place: Path) -> Estimate:
    with open_checkpoint(models.base) as base:
        model = BaseModel.examine(base, measure=False)
        vectors = [make_task_vector(model, base, open_checkpoint(expert)) for expert in models.experts]
        step = Step(method, vectors)
        costs = list(map(step.carrying_cost, model.tensors))
        inputs = [base, *(vector.expert for vector in vectors)]
        rates = measured_rates(costs, lambda sample: carrying(sample, method), model, engine.workers, inputs, place)
    return predict(costs, rates, engine.workers, FLUSHES["export"])


def carrying(sample: Sample, method: Method) -> Callable[[], object]:
    """What being carried through two models does to each of them."""
    step = Step(method, sample.vectors)
    sample.elements, sample.tensors = 2 * sample.elements, 2 * sample.tensors

    def run() -> None:
        speak(sample, ExpertsSource(step, sample.base, find_thresholds(step, sample.engine)).pieces)

    return run


def speak(sample: Sample, pieces: Callable[[str, str], Iterator[tuple[int, Tensor]]]) -> None:
    def digest(name: str) -> None:
        tensor = sample.model.tensors[name]
        hasher = TensorHasher(sample.models[0][name].dtype, tensor.shape)
        for _, piece in pieces(name, tensor.dtype):
            hasher.update(piece)

    list(sample.engine.run(dict.fromkeys(sample.model.tensors, 1), digest))


def taken(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and processor seconds."""
    watch = Stopwatch()
    watch.timed(run)
    return watch.seconds, watch.processor


def stores(models: Family, methods: list[str], place: Path) -> Iterator[tuple[str, Store]]:
    """With one expert each, one after the other."""
    large = models.model == SIZES[-1]
    for name in (name for name in methods if not (large and name in SLOW)):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        store = Store.create(place / "store", models.base, METHODS[name], engine=LocalEngine(), progress=Progress())
        store.add(models.experts[0])
        yield name, store


def measure(models: Family, methods: list[str], place: Path) -> Iterator[Row]:
    for name, store in stores(models, methods, place):
        predicted = adding(store, models.experts[1])
        yield Row(models.model, f"{name}, add", predicted, *taken(partial(store.add, models.experts[1])))
        predicted = exporting(store, place)
        export = partial(store.export, place / "out", pictures=False)
        yield Row(models.model, f"{name}, export", predicted, *taken(export))
    engine = LocalEngine(1)
    for name, method in ONE_SHOT.items():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        predicted = merging(models, method, engine, place)
        run = partial(merge, models.base, models.experts, place / "out", method, engine=engine, progress=Progress())
        yield Row(models.model, f"{name}, merge of 3", predicted, *taken(run))


def print_row(row: Row) -> None:
    said = row.predicted
    print(
        f"| {row.model} | {row.work} | {said.flops / 1e9:.0f} | {said.reads / 1e6:.0f} | {said.writes / 1e6:.0f} "
        f"| {said.processor:.2f} | {row.processor:.2f} | {row.processor_ratio:.2f} "
        f"| {said.seconds:.2f} | {row.seconds:.2f} | {row.ratio:.2f} | {said.bottleneck} |",
        flush=True,
    )


def print_inspections(models: Family, methods: list[str], place: Path) -> Iterator[float]:
    """The ratios too."""
    for name, store in stores(models, methods, place):
        said = store.inspect(models.experts[1]).seconds
        took, _ = taken(partial(store.add, models.experts[1]))
        print(f"| {models.model} | {name} | {said:.2f} | {took:.2f} | {said / took:.2f} |", flush=True)
        yield said / took


def print_ratios(what: str, ratios: list[float]) -> None:
    within = sum(1 / 1.5 <= ratio <= 1.5 for ratio in ratios)
    print(f"{what}: ratios from {min(ratios):.2f} to {max(ratios):.2f}, ", end="")
    print(f"median {statistics.median(ratios):.2f}; {within} of {len(ratios)} within a factor of 1.5")


def print_head(head: list[str]) -> None:
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=SIZES)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--inspect", action="store_true", help="what inspect says of an add, beside what it takes")
    arguments = parser.parse_args()
    place = arguments.cache / "stores" / "prediction"
    print(", ".join(f"{key} {value}" for key, value in machine().items()), end="\n\n")
    families = (family(model, 3, arguments.cache) for model in arguments.models)
    if arguments.inspect:
        print_head(["model", "method", "inspect says, s", "the add took, s", "ratio"])
        ratios = [ratio for models in families for ratio in print_inspections(models, arguments.methods, place)]
        print()
        print_ratios("wall", ratios)
    else:
        head = [*("model", "work", "GFLOP", "MB read", "MB written"), *("predicted CPU s", "took", "ratio")]
        print_head([*head, "predicted wall s", "took", "ratio", "most of it"])
        rows: list[Row] = []
        for row in (row for models in families for row in measure(models, arguments.methods, place)):
            rows.append(row)
            print_row(row)
        print()
        print_ratios("CPU", [row.processor_ratio for row in rows])
        print_ratios("wall", [row.ratio for row in rows])
    shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
