"""What a step is planned to take, beside what it really reads, writes and waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mergestream import OPCM, TIES, Average, Ledger, MagMax, Method, Store
from mergestream.checkpoints import SafetensorsWriter
from mergestream.checkpoints.safetensors import SafetensorsFile
from mergestream.engine import LocalEngine
from mergestream.merging.plan import peak_memory
from mergestream.methods.base import Context
from tests.conftest import Toys, save_model, toy_base, toy_expert
from tests.handmade import handmade_adapter

METHODS = [OPCM(), Average(), MagMax(), TIES(), TIES(mode="streaming"), Ledger()]


def called(method: object) -> str:
    return f"{getattr(method, 'name', method)}-{getattr(method, 'projection', getattr(method, 'mode', ''))}"


@dataclass
class Bytes:
    read: int = 0
    written: int = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bytes]:
    """All tensors that are read from files, and those of a step that are written."""
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


@pytest.mark.parametrize("method", METHODS, ids=called)
def test_a_step_writes_what_inspect_has_said(
    method: Method, toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path / "store", toys.base, method)
    for number, expert in enumerate(toys.experts[:2], start=1):
        said = store.inspect(expert)
        with counted(monkeypatch) as seen:
            store.add(expert)
        assert said.disk == seen.written, f"step {number}"


@pytest.mark.parametrize("method", ["opcm", "ledger"])
def test_an_adapter_reads_its_factors_and_none_of_the_base(
    method: str, toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path / method, toys.base, method)
    for seed in range(2):
        adapter = handmade_adapter(tmp_path / f"{method}-adapter-{seed}", seed)
        said = store.inspect(adapter)
        with counted(monkeypatch) as seen:
            store.add(adapter)
        assert 0 < seen.read < toys.base.joinpath("model.safetensors").stat().st_size
        assert 0 < said.disk <= seen.written


@pytest.mark.parametrize("method", METHODS, ids=called)
def test_matrices_of_a_7b_need_no_more_than_4_gb(method: Method) -> None:
    """Two at a time; the embedding, which only a ledger takes whole, alone (`benchmarks.large` measures it)."""

    def memory(*shape: int) -> int:
        return peak_memory(method, Context(2, shape[0] != 32000, shape, torch.float32), vectors=3)

    assert memory(4096, 4096) + memory(4096, 11008) <= 2 * memory(11008, 4096) <= 4e9
    assert memory(32000, 4096) <= 4e9


def test_the_largest_tensors_are_absorbed_first(toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.create(tmp_path / "store", toys.base, engine=LocalEngine(1))
    absorbed: list[str] = []
    original = Ledger.absorb

    def absorb(method: Any, state: Any, delta: Any, context: Any) -> Any:
        absorbed.append(context.tensor)
        return original(method, state, delta, context)

    monkeypatch.setattr(Ledger, "absorb", absorb)
    store.add(toys.experts[0])
    sizes = [store.manifest.base.tensors[name].numel for name in absorbed]
    assert len(sizes) > 2 and sizes == sorted(sizes, reverse=True)


def test_an_inspection_says_how_long_adding_takes(tmp_path: Path) -> None:
    """But for a factor that no other work on the machine makes up for."""
    base = {"layers.0.q.weight": torch.randn(384, 384), **toy_base()}
    paths = [save_model(tmp_path / str(number), toy_expert(number, base)) for number in range(3)]
    store = Store.create(tmp_path / "store", paths[0], OPCM(), engine=LocalEngine(1))
    store.add(paths[1])
    said = store.inspect(paths[2])
    started = time.monotonic()
    store.add(paths[2])
    spent = time.monotonic() - started
    assert spent / 20 < said.seconds < 20 * spent
