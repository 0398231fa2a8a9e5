"""How long a command will take, and the rates that it is told by."""

from __future__ import annotations

import math
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from mergestream import OPCM, Average, Store
from mergestream.algebra.work import Kernel, Work
from mergestream.checkpoints import open_checkpoint
from mergestream.engine import LocalEngine
from mergestream.merging.cost import Cost, absorbing
from mergestream.merging.prediction import FLUSHES, Rates, Sample, measured_rates, predict, read_rates, write_rates
from mergestream.methods.base import Context
from mergestream.store.arrival import Arrival
from tests.conftest import Toys, save_model, toy_base, toy_expert

KERNELS: tuple[Kernel, ...] = ("product", "product64", "eigen", "leading", "orthonormal", "svd")
RATES = Rates(
    read=100.0,
    write=50.0,
    flushes=2.0,
    touched=1000.0,
    elements=10.0,
    tensors=5.0,
    kernels={kernel: {100: 10.0, 1000: 30.0} for kernel in KERNELS},
    busy=2.0,
)


def test_a_prediction_adds_up() -> None:
    costs = [Cost(1000, 500, 20, [Work("eigen", 1000, 600.0)]), Cost(0, 0, 0, [Work("product", 100, 50.0)])]
    alone = predict(costs, RATES, 1, flushes=4)
    assert (alone.reading, alone.writing) == (10.0, 10.0 + 2.0)
    assert alone.computing == 2 * (600 / 30 + 50 / 10)
    assert alone.passing == 2 * (20 / 10 + 2 / 5)
    assert alone.seconds == pytest.approx(alone.reading + alone.computing + alone.passing + alone.writing)
    assert alone.processor == pytest.approx(25 + 2.4 + 1.5)
    assert (alone.reads, alone.writes, alone.flops, alone.bottleneck) == (1000, 500, 650.0, "linear algebra")


def test_many_workers_wait_for_the_disk_or_for_the_largest_tensor() -> None:
    even = [Cost(1000, 0, 0, [Work("eigen", 1000, 30.0)])] * 100
    assert predict(even, RATES, 1).seconds == pytest.approx(1000 + 200 + 40)
    many = predict(even, RATES, 100)
    assert many.seconds == many.reading == 1000 and many.bottleneck == "reading"
    uneven = [Cost(work=[Work("eigen", 1000, flops)]) for flops in (3000.0, 30.0, 30.0)]
    assert predict(uneven, RATES, 100).computing == 2 * 100


def test_rates_between_two_sides_and_beyond_them() -> None:
    for side, rate in ((10, 10.0), (100, 10.0), (1000, 30.0), (5000, 30.0)):
        assert RATES.seconds(Work("svd", side, 60.0)) == pytest.approx(60 / rate)
    assert 60 / 30 < RATES.seconds(Work("svd", 316, 60.0)) < 60 / 10


def test_what_is_measured_is_no_more_than_is_needed(toys: Toys, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", toys.base, Average())
    with Arrival(store, toys.experts[0], partial=False, ignore=(), measured=False) as arrival:
        vector, sums = arrival.vector, list(map(arrival.step.cost, arrival.step.names))
        matrices = Cost(work=[Work("product64", 64, 1.0), Work("product", 200, 1.0)])
        for costs, sides in ((sums, {}), ([*sums, matrices], {"product64": 1, "product": 2})):
            found = measured_rates(
                costs, partial(Sample.absorbing, method=Average(), t=1), vector.model, 2, vector.inputs, tmp_path
            )
            assert {kernel: len(rates) for kernel, rates in found.kernels.items()} == sides
            values = found.read, found.write, found.flushes, found.touched, found.elements, found.tensors, found.busy
            assert all(0 < value < math.inf for value in values)


def test_files_where_nothing_may_be_written_or_read(toys: Toys, tmp_path: Path) -> None:
    with open_checkpoint(toys.base) as base:
        assert all(rate > 0 for rate in read_rates([base], 1 << 20))
    assert write_rates(tmp_path / "nowhere", 1) is None


def test_a_step_waits_as_often_for_the_disk_as_is_said(toys: Toys, tmp_path: Path, monkeypatch) -> None:
    store, flushed = Store.create(tmp_path / "store", toys.base, Average()), []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(file) or fsync(file))
    store.add(toys.experts[0])
    assert len(flushed) == FLUSHES["add"]
    flushed.clear()
    store.export(tmp_path / "out", pictures=False)
    assert len(flushed) == FLUSHES["export"] - 1  # the toys have no config


def test_an_inspection_says_what_adding_then_reads_and_writes(tmp_path: Path) -> None:
    """And the time, but for a factor that no other work on the machine makes up for."""
    base = {"layers.0.q.weight": torch.randn(384, 384), **toy_base()}
    paths = [save_model(tmp_path / str(number), toy_expert(number, base)) for number in range(3)]
    store = Store.create(tmp_path / "store", paths[0], OPCM(), engine=LocalEngine(1))
    store.add(paths[1])
    said = store.inspect(paths[2])
    started = time.process_time()
    store.add(paths[2])
    spent = time.process_time() - started
    assert said.disk == said.predicted.writes and said.predicted.bottleneck == said.to_json()["predicted"]["bottleneck"]
    assert spent / 10 < said.predicted.processor < 10 * spent


@pytest.mark.parametrize("projection", ["reference", "block"])
def test_processor_time_grows_as_the_operations_do(projection) -> None:
    """Between 192 and 768 they are 64-fold, and what is slower about small matrices is known to be less than 3-fold."""
    method, spent, said = OPCM(projection=projection), [], []
    for side in (192, 768):
        S, delta = torch.randn(2, side, side, generator=torch.Generator().manual_seed(0))
        context = Context(2, True, (side, side))
        tries = []
        for _ in range(3):
            started = time.thread_time()
            method.absorb({"sum": S}, delta, context)
            tries.append(time.thread_time() - started)
        spent.append(min(tries))
        said.append(absorbing(method, context, 0, 0).flops)
    assert 1 / 6 < (said[1] / said[0]) / (spent[1] / spent[0]) < 6
