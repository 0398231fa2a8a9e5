"""How long something will take: what it costs, by the rates at which this machine reads, writes and computes just now.

Rates are measured on matrices and models that are small, in about a second, or in less than the work itself will take.
All workers do the same at once, so that they are as slow as they make each other. The formulas are in `merging/cost.py`
and docs/scale.md.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mergestream.algebra import work
from mergestream.algebra.lapack import eigh_upper
from mergestream.algebra.pieces import PIECE
from mergestream.algebra.svd import gram
from mergestream.algebra.work import Kernel, Work
from mergestream.base.model import BaseModel
from mergestream.checkpoints import Checkpoint, open_checkpoint, torch_dtype
from mergestream.digest import tensor_digest
from mergestream.engine import LocalEngine
from mergestream.experts import make_task_vector
from mergestream.experts.sketch import Sketch
from mergestream.merging.cost import Cost, together
from mergestream.merging.merger import MemoryState
from mergestream.merging.step import Step, no_state
from mergestream.methods.base import Method
from mergestream.progress import Progress

FLUSHES = {"add": 15, "export": 8}
"""How often a command waits until something small is on the disk"""
_TRIES = 3
_PIECES = 4
"""Of each tensor in a sample"""
_TINY = 64
"""Tensors in a sample of those that take no time but for themselves"""
_PROBED = 32 << 20
"""Bytes that are read and written at most to know how fast that goes"""
_PLACES = 8
"""Of a checkpoint that are read"""
_SIDES: dict[Kernel, tuple[int, int]] = {
    "product": (128, 1024),
    "product64": (128, 768),
    "eigen": (192, 640),
    "leading": (192, 640),
    "orthonormal": (48, 256),
    "svd": (48, 192),
}
"""At which the kernels are measured: a small one, and one from which on the rate stays about the same"""


@dataclass(frozen=True)
class Rates:
    """What is done a second."""

    read: float
    """Bytes"""
    write: float
    """Bytes, until they are on the disk"""
    flushes: float
    """Next to nothing, until it is on the disk"""
    touched: float
    """Bytes, read or written, that are in memory already: of processor time as all below"""
    elements: float
    tensors: float
    kernels: Mapping[Kernel, Mapping[int, float]]
    """Operations, by the side of what they work on"""
    busy: float = 1.0
    """Seconds that a worker waits for one of processor time: others use the machine, or it waits for its like"""

    def seconds(self, part: Work) -> float:
        """Of a processor. Between sides that were measured the rate is interpolated, beyond them it stays."""
        known = sorted(self.kernels[part.kernel].items())
        (low, slow), (high, fast) = known[0], known[-1]  # one and the same where nothing larger is needed
        place = math.log(min(max(part.side, low), high) / low) / math.log(high / low) if high > low else 0.0
        return part.flops / (slow + place * (fast - slow))


@dataclass(frozen=True)
class Estimate:
    """Of a command: the seconds that one waits for it, and what it does in them."""

    seconds: float
    processor: float
    """Seconds of processors, all together"""
    reading: float
    """Seconds, as the next three: some of them pass at the same time"""
    passing: float
    """Elements one by one: converting, subtracting, measuring, digesting"""
    computing: float
    """The linear algebra"""
    writing: float
    reads: int
    """Bytes"""
    writes: int
    flops: float
    """Of the linear algebra"""

    @property
    def bottleneck(self) -> str:
        """What takes the most of the time."""
        parts = {"linear algebra": self.computing, "elementwise arithmetic": self.passing}
        parts |= {"reading": self.reading, "writing": self.writing}
        return max(parts, key=lambda part: parts[part])


def predict(costs: Sequence[Cost], rates: Rates, workers: int, flushes: int = 0) -> Estimate:
    """Of many tensors. One worker reads and computes in turn; many read while others compute."""
    each = [math.fsum(map(rates.seconds, cost.work)) for cost in costs]
    total, algebra = together(costs), math.fsum(each)
    elementwise = total.elements / rates.elements + len(costs) / rates.tensors
    computing = rates.busy * max(algebra / workers, max(each, default=0.0))
    passing = rates.busy * elementwise / workers
    reading, writing = total.reads / rates.read, total.writes / rates.write + flushes / rates.flushes
    seconds = max(reading, computing + passing + reading / workers) + writing
    processor = algebra + elementwise + (total.reads + total.writes) / rates.touched
    parts = seconds, processor, reading, passing, computing, writing
    return Estimate(*parts, total.reads, total.writes, total.flops)


def measured_rates(
    costs: Sequence[Cost],
    passing: Passing,
    model: BaseModel,
    workers: int,
    inputs: Sequence[Checkpoint],
    place: Path | None,
) -> Rates:
    """Of so many workers that read these checkpoints and write to a directory; elsewhere writing counts as reading.
    Where they are more than this machine has cores, it is one of several that are alike."""
    total, here = together(costs), min(workers, os.cpu_count() or 1)
    largest = max(model.merged, key=lambda name: model.tensors[name].numel)
    dtype = torch_dtype(model.tensors[largest].dtype)
    tiny, large = (Sample(dtype, here, count) for count in (0, total.elements))
    read, touched = read_rates(inputs, total.reads)
    write, flushes = (write_rates(place, total.writes) if place else None) or (read, math.inf)
    watch, (of_elements, of_tensors) = Stopwatch(), (passing(large), passing(tiny))
    elements, tensors = large.elements / watch.best(of_elements), tiny.tensors / watch.best(of_tensors)
    kernels = _kernel_rates(total.work, here, watch)
    busy = watch.seconds * here / watch.processor
    return Rates(read, write, flushes, touched, elements, tensors, kernels, busy)


class Stopwatch:
    """Seconds and processor seconds of all that it was held to."""

    def __init__(self) -> None:
        self.seconds = self.processor = 0.0

    def best(self, run: Callable[[], object]) -> float:
        """Processor seconds of several tries: the first is seldom the shortest."""
        return min(self.timed(run) for _ in range(_TRIES))

    def timed(self, run: Callable[[], object]) -> float:
        """Processor seconds, of all threads."""
        started, spent = time.perf_counter(), time.process_time()
        run()
        spent = time.process_time() - spent
        self.seconds, self.processor = self.seconds + time.perf_counter() - started, self.processor + spent
        return spent


# --- the linear algebra


def _kernel_rates(parts: Sequence[Work], workers: int, watch: Stopwatch) -> dict[Kernel, dict[int, float]]:
    """Of the kernels that are needed, no larger than necessary."""
    largest: dict[Kernel, int] = {}
    for part in parts:
        largest[part.kernel] = max(part.side, largest.get(part.kernel, 0))
    return {
        kernel: {side: _kernel_rate(kernel, side, workers, watch) for side in _sides(kernel, most)}
        for kernel, most in largest.items()
    }


def _sides(kernel: Kernel, largest: int) -> tuple[int, ...]:
    low, high = _SIDES[kernel]
    return (low, high) if largest > low else (low,)


def _kernel_rate(kernel: Kernel, side: int, workers: int, watch: Stopwatch) -> float:
    """Operations a second of one worker, while the others do the same."""

    def measured(_: str) -> float:
        run, counted = _probe(kernel, side)
        return counted.flops / min(_thread_seconds(run) for _ in range(_TRIES))

    jobs = dict.fromkeys(map(str, range(workers)), 1)
    found: list[float] = []
    watch.timed(lambda: found.extend(rate for _, rate in LocalEngine(workers).run(jobs, measured)))
    return statistics.mean(found)


def _thread_seconds(run: Callable[[], object]) -> float:
    started = time.thread_time()
    run()
    return time.thread_time() - started


def _probe(kernel: Kernel, side: int) -> tuple[Callable[[], object], Work]:
    """Something of this size to be timed, and what it counts as."""
    matrix = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    tall, squared = matrix.repeat(4, 1), gram(matrix)
    probes: dict[Kernel, tuple[Callable[[], object], Work]] = {
        "product": (lambda: matrix @ matrix, work.product(side, side, side)),
        "product64": (lambda: gram(matrix), work.gram(side, side)),
        "eigen": (lambda: eigh_upper(squared.clone(), torch.float32), work.eigenvectors(side)),
        "leading": (
            lambda: eigh_upper(squared.clone(), torch.float32, lambda values: side // 8),
            work.eigenvectors(side, side // 8),
        ),
        "orthonormal": (lambda: torch.linalg.qr(tall).Q, work.orthonormal(4 * side, side)),
        "svd": (lambda: torch.linalg.svd(squared), work.small_svd(side)),
    }
    return probes[kernel]


# --- elements one by one


class Sample:
    """A base and experts in memory, small enough to be absorbed and read out in some milliseconds."""

    def __init__(self, dtype: torch.dtype, workers: int, elements: int) -> None:
        """Of no more ``elements`` than are asked for; without any, of many tensors that have next to none."""
        count, size = (2 * workers, min(_PIECES * PIECE, elements)) if elements else (_TINY, 1)
        drawn = torch.randn(size, generator=torch.Generator().manual_seed(0))
        names = [f"tensor.{number}" for number in range(count)]
        self.models = [{name: (drawn + step * drawn / 99).to(dtype) for name in names} for step in range(3)]
        self.elements, self.tensors = count * size, count
        self.base = open_checkpoint(self.models[0])
        self.model = BaseModel.examine(self.base, progress=Progress())
        self.vectors = [make_task_vector(self.model, self.base, open_checkpoint(model)) for model in self.models[1:]]
        self.engine = LocalEngine(workers)

    def absorbed(self, method: Method, vector: int, before: MemoryState | None) -> MemoryState:
        read_state, sketch = before.read if before else no_state, Sketch(self.model.tensors)
        step = Step(method, [self.vectors[vector]], vector, read_state, sketch=sketch)
        state = MemoryState(step)
        list(step.run(self.engine, state))
        return state

    def absorbing(self, method: Method, t: int) -> Callable[[], object]:
        """What absorbing the t-th model does to its elements."""
        if t == 1:
            return partial(self.absorbed, method, 0, None)
        return partial(self.absorbed, method, 1, self.absorbed(method, 0, None))


Passing = Callable[[Sample], Callable[[], object]]
"""What is done to every element, made ready to be done to those of a sample"""


# --- files


def read_rates(checkpoints: Sequence[Checkpoint], needed: int) -> tuple[float, float]:
    """Bytes a second, and a second of processor time, of tensors as they are read: from a disk, a network, or memory
    where they are there already."""
    done, watch, most = 0, Stopwatch(), min(_PROBED, needed // len(checkpoints))
    for checkpoint in checkpoints:
        sizes = {name: info.nbytes for name, info in checkpoint.tensors.items() if info.nbytes}
        small = [name for name in sizes if sizes[name] <= most] or sorted(sizes, key=lambda name: sizes[name])[:1]
        largest = sorted(small, key=lambda name: -sizes[name])[:_PLACES]
        for name in largest if checkpoint.has_weights else ():
            part = sizes[name] if checkpoint.copies else min(sizes[name], max(most // _PLACES, 1))
            watch.timed(partial(_touch, checkpoint, name, part))
            done += part
    return (done / watch.seconds, done / watch.processor) if done else (math.inf, math.inf)


def _touch(checkpoint: Checkpoint, name: str, size: int) -> None:
    tensor_digest(checkpoint.read(name).reshape(-1).view(torch.uint8)[:size])


def write_rates(directory: Path, needed: int) -> tuple[float, float] | None:
    """Bytes, and flushes of next to nothing, a second until they are on the disk; None where nothing may be written."""
    data = os.urandom(1 << 16)
    count = max(1, min(_PROBED, needed) // len(data))
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:

            def write(times: int) -> None:
                for _ in range(times):
                    file.write(data)
                os.fsync(file.fileno())

            flush = statistics.median(_waited(lambda: write(1)) for _ in range(_TRIES))
            return count * len(data) / max(_waited(lambda: write(count)) - flush, 1e-6), 1 / flush
    except OSError:
        return None


def _waited(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
