"""What a tensor is said to cost, beside what is really read, written and multiplied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mergestream import OPCM, TIES, Average, Ledger, MagMax, Method, Store, TaskArithmetic, merge
from mergestream.algebra import work
from mergestream.algebra.projection import project
from mergestream.algebra.svd import thin_svd
from mergestream.algebra.truncated import truncated_svd
from mergestream.base.model import BaseModel
from mergestream.checkpoints import SafetensorsWriter, open_checkpoint
from mergestream.checkpoints.safetensors import SafetensorsFile
from mergestream.engine import LocalEngine
from mergestream.experts import make_task_vector
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.ledger.readouts.iso import Iso
from mergestream.ledger.readouts.tempered import Tempered
from mergestream.ledger.readouts.tsv import Tsv
from mergestream.ledger.span import Entry, Product, Span
from mergestream.merging.cost import absorbing, memory_of, together
from mergestream.merging.step import Step
from mergestream.methods.base import Context
from mergestream.store.arrival import Arrival
from tests.conftest import Toys
from tests.handmade import handmade_adapter

METHODS = [OPCM(), Average(), MagMax(), TIES(), TIES(mode="streaming"), Ledger()]
ONE_SHOT = [Average(), TaskArithmetic(), TIES(mode="streaming"), TIES(mode="streaming", trim="tensor"), Ledger()]


def called(method: object) -> str:
    return f"{getattr(method, 'name', method)}-{getattr(method, 'projection', getattr(method, 'mode', ''))}"


@dataclass
class Bytes:
    read: int = 0
    written: int = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bytes]:
    """All tensors that are read from files and written to them."""
    seen, read, write = Bytes(), SafetensorsFile.read, SafetensorsWriter.write_piece

    def counting_read(file: SafetensorsFile, name: str) -> torch.Tensor:
        seen.read += file.tensors[name].nbytes
        return read(file, name)

    def counting_write(writer: SafetensorsWriter, name: str, start: int, piece: torch.Tensor) -> None:
        seen.written += piece.nbytes
        write(writer, name, start, piece)

    with monkeypatch.context() as patched:
        patched.setattr(SafetensorsFile, "read", counting_read)
        patched.setattr(SafetensorsWriter, "write_piece", counting_write)
        yield seen


def step_of(store: Store, expert: Path) -> Step:
    with Arrival(store, expert, partial=False, ignore=(), measured=False) as arrival:
        return arrival.step


@pytest.mark.parametrize("method", METHODS, ids=called)
def test_reads_and_writes_of_a_store_are_what_was_said(method: Method, toys: Toys, tmp_path: Path, monkeypatch) -> None:
    store = Store.create(tmp_path / "store", toys.base, method)
    for number, expert in enumerate(toys.experts[:2], start=1):
        step = step_of(store, expert)
        said = together(map(step.cost, step.names))
        with counted(monkeypatch) as seen, Arrival(store, expert, False, (), False) as arrival:
            writer = arrival.writer()
            arrival.absorb(writer)
            writer.abandon()
        assert (said.reads, said.writes) == (seen.read, seen.written), f"step {number}"
        store.add(expert)
    with store.snapshot() as snapshot:
        reading = snapshot.reading(store.engine)
        said = together(map(reading.cost, reading.model.tensors))
    with counted(monkeypatch) as seen:
        store.export(tmp_path / "out", pictures=False)
    assert said.reads == seen.read


@pytest.mark.parametrize("method", ONE_SHOT, ids=called)
def test_reads_and_writes_of_a_merge_are_what_was_said(method: Method, toys: Toys, tmp_path: Path, monkeypatch) -> None:
    experts = toys.experts[:3]
    with open_checkpoint(toys.base) as base:
        model = BaseModel.examine(base, measure=False)
        step = Step(method, [make_task_vector(model, base, open_checkpoint(expert)) for expert in experts])
        said = together(map(step.carrying_cost, model.tensors))
    monkeypatch.setattr("mergestream.export.one_shot._check_origin", lambda *_: None)  # reads a few tensors more
    with counted(monkeypatch) as seen:
        merge(toys.base, experts, tmp_path / "out", method, engine=LocalEngine(1))
    assert (said.reads, said.writes) == (seen.read, seen.written)


def test_an_adapter_reads_its_factors_and_none_of_the_base(toys: Toys, tmp_path: Path, monkeypatch) -> None:
    for method in ("opcm", "ledger"):
        store = Store.create(tmp_path / method, toys.base, method)
        for seed in range(2):
            adapter = handmade_adapter(tmp_path / f"{method}-adapter-{seed}", seed)
            step = step_of(store, adapter)
            said = together(map(step.cost, step.names))
            with counted(monkeypatch) as seen:
                store.add(adapter)
            assert 0 < said.reads <= seen.read < toys.base.joinpath("model.safetensors").stat().st_size
            assert 0 < said.writes <= seen.written


def flops(parts: list[work.Work], *kernels: str) -> float:
    return sum(part.flops for part in parts if part.kernel in kernels)


class Products(TorchDispatchMode):
    """Counts the operations of torch's products; those of NumPy and LAPACK are not seen."""

    flops = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            (m, k), (_, n) = (factor.shape for factor in arguments[-2:])
            self.flops += 2 * m * k * n
        return function(*arguments, **(keywords or {}))


def multiplied(run: Callable[[], object]) -> int:
    with Products() as products:
        run()
    return products.flops


@pytest.mark.parametrize("form", ["reference", "paper", "block"])
@pytest.mark.parametrize("shape", [(60, 40), (40, 60)])
def test_products_of_a_projection_are_counted(form, shape: tuple[int, int]) -> None:
    S, delta, q = torch.randn(shape), torch.randn(shape), 7
    svd = thin_svd(S)
    said = work.projection(*shape, q, form)
    assert flops(said, "product") == multiplied(lambda: project(delta, svd, q, form))


@pytest.mark.parametrize("leading", [None, 5])
def test_products_of_a_decomposition_are_counted(leading: int | None) -> None:
    S = torch.randn(60, 40)
    said = work.thin_svd(60, 40, leading)
    wanted = (lambda s: leading) if leading else None
    assert flops(said, "product") == multiplied(lambda: thin_svd(S, wanted))


def test_products_of_a_random_decomposition_are_about_those_of_a_task_vector() -> None:
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(side, 400, generator=generator)).Q for side in (600, 400))
    S = (u * torch.arange(1, 401) ** -0.7) @ v.T
    said = work.truncated_svd(600, 400, 50, "randomised")
    half_a_gram = 600 * 400**2
    assert 0.5 < multiplied(lambda: truncated_svd(S, 50, "randomised")) / (flops(said, "product") - half_a_gram) < 2


@pytest.mark.parametrize("readout", [Tsv(), Tempered(), Iso()], ids=called)
def test_products_of_a_readout_are_counted(readout: EntriesReadout) -> None:
    ledger, context = Ledger(), Context(3, True, (96, 64))
    slots = [ledger.absorb(None, torch.randn(96, 64), context).state for _ in range(3)]
    (span,) = Span.of([Entry(entry) for entry in slots], torch.float32, False)
    said = [*readout.operations(96, 64, len(span.sigma)), work.product(96, len(span.sigma), 64)]
    grams = 2 * len(span.sigma) ** 2 * (96 + 64) / 2
    seen = multiplied(lambda: Product(span, readout.coefficients(span), False).dense())
    assert flops(said, "product", "product64") - grams == seen


def test_matrices_that_are_decomposed_begin_before_larger_ones_that_are_not() -> None:
    """By elements alone an embedding would come first, and a decomposition would be left for the end."""
    method, linear, other = OPCM(), Context(2, True, (512, 512)), Context(2, False, (2048, 512))
    costs = [absorbing(method, context, 0, 1 << 20) for context in (linear, other)]
    assert costs[0].weight > costs[1].weight


@pytest.mark.parametrize("method", METHODS, ids=called)
def test_matrices_of_a_7b_need_no_more_than_4_gb(method: Method) -> None:
    """Two at a time; the embedding, which only a ledger takes whole, alone (`benchmarks.large` measures it)."""

    def memory(*shape: int) -> int:
        return memory_of(method, Context(2, shape[0] != 32000, shape, torch.float32), vectors=3)

    assert memory(4096, 4096) + memory(4096, 11008) <= 2 * memory(11008, 4096) <= 4e9
    assert memory(32000, 4096) <= 4e9
