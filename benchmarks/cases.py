"""The measured cases: the commands of mergestream, of other tools and of the hardware limits."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoints import CACHE, Family
from benchmarks.measure import ROOT, Cost, run
from mergestream.methods.base import Method
from mergestream.store.store import Store

OUT = CACHE / "out"
Command = tuple[str | Path, ...]
PYTHON: Command = (sys.executable, "-m")
PEERS: Command = (ROOT / ".venv-peers" / "bin" / "python", "-m")
CLI = Path(sys.executable).with_name("mergestream")

OURS, COMMAND = "mergestream", "mergestream (command)"
MERGER, MERGER_BLOCK = "mergestream (in memory)", "mergestream (in memory, block projection)"
LEDGER, OPCM_BLOCK = "mergestream, ledger", "mergestream, OPCM with the block projection"
FLOOR, KERNELS = "floor", "bare kernels"
FUSIONBENCH, MERGEKIT = "FusionBench", "mergekit"


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a case."""

    name: str
    command: Command
    prepare: Callable[[], object] = lambda: None

    @property
    def is_peer(self) -> bool:
        return self.name.split(",")[0] in (FUSIONBENCH, MERGEKIT)

    @property
    def is_ours(self) -> bool:
        """Whether it is mergestream itself, not only its kernels."""
        return "benchmarks.ours" in self.command


@dataclass(frozen=True)
class Case:
    title: str
    contenders: tuple[Contender, ...]

    def measure(self, repetitions: int, peer_repetitions: int) -> dict[str, list[Cost]]:
        """Measure all contenders in every round, so that a busy minute affects all of them."""
        costs: dict[str, list[Cost]] = {contender.name: [] for contender in self.contenders}
        for number in range(max(repetitions, peer_repetitions)):
            for contender in self.contenders:
                if number < (peer_repetitions if contender.is_peer else repetitions):
                    contender.prepare()
                    cost = run(contender.command)
                    costs[contender.name].append(cost)
                    print(f"{self.title}: {contender.name}: {_line(cost)}", file=sys.stderr, flush=True)
        return costs


def _line(cost: Cost) -> str:
    inside = f", of which work {cost.work['wall']:.2f} s / {cost.work['cpu']:.2f} s" if cost.work else ""
    return f"{cost.wall:.2f} s wall, {cost.cpu:.2f} s CPU{inside}, {cost.anonymous / 1e6:.0f} MB"


def fresh(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    return path


def store_with(path: Path, family: Family, method: Method, experts: int) -> Path:
    """Return a store with the first `experts` experts."""
    store = Store.create(fresh(path), family.base, method)
    for expert in family.experts[:experts]:
        store.add(expert)
    return path


def back_to(store: Path, step: int) -> None:
    """Undo the adds of earlier rounds."""
    opened = Store(store)
    while opened.manifest.step > step:
        opened.undo()


def previous_state(store: Path, step: int) -> Path:
    return store / "steps" / f"{step:04d}"


def floor(read: Sequence[Path], copy: Path, *, label: str = FLOOR) -> Contender:
    output = OUT / "floor"
    command: Command = (*PYTHON, "benchmarks.floor", "--read", *read, "--copy", copy, "--output", output)
    return Contender(label, command, lambda: fresh(output))


def add(store: Path, expert: Path, step: int, *, label: str = OURS, within: str | None = None) -> Contender:
    """Add one expert to a store with `step` experts; `within` limits the memory for tensors."""
    command: Command = (*PYTHON, "benchmarks.ours", "add", store, expert, *_budget(within))
    return Contender(label, command, lambda: back_to(store, step))


def add_command(store: Path, expert: Path, step: int) -> Contender:
    """Add by shell command, including Python's start and the imports."""
    return Contender(COMMAND, (CLI, "add", store, expert, "--quiet"), lambda: back_to(store, step))


def merger(family: Family, projection: str, label: str) -> Contender:
    """Add to a `Merger` in memory, as FusionBench's step does."""
    command: Command = (*PYTHON, "benchmarks.ours", "merger", "--base", family.base, "--projection", projection)
    return Contender(label, (*command, *family.experts))


def kernels(family: Family, projection: str = "reference", *, label: str = KERNELS) -> Contender:
    """Run only the decompositions and products of one OPCM step, on all cores, with the matrices in memory."""
    command: Command = (*PYTHON, "benchmarks.kernels", "--projection", projection, "--base", family.base)
    return Contender(label, (*command, "--experts", *family.experts[:2]))


def ledger_add_kernels(base: Path, expert: Path, *, label: str = KERNELS) -> Contender:
    """Run only the reads, differences and truncated SVDs of one `add` to a ledger, on all cores."""
    return Contender(label, (*PYTHON, "benchmarks.ledger", "add", "--base", base, expert))


def ledger_export_kernels(store: Path, *, label: str = KERNELS) -> Contender:
    """Run only the products and eigenvectors of one `export` by agree, on all cores, with the entries in memory."""
    return Contender(label, (*PYTHON, "benchmarks.ledger", "export", store))


def export(store: Path, out: Path, *, label: str = OURS, within: str | None = None) -> Contender:
    command: Command = (*PYTHON, "benchmarks.ours", "export", store, out, *_budget(within))
    return Contender(label, command, lambda: fresh(out))


def _budget(within: str | None) -> Command:
    return ("--max-memory", within) if within else ()


def merge(
    family: Family,
    method: str,
    *parameters: str,
    label: str = OURS,
    out: Path = OUT / "merged",
    within: str | None = None,
) -> Contender:
    settings = [part for parameter in parameters for part in ("--set", parameter)]
    command: Command = (*PYTHON, "benchmarks.ours", "merge", "--base", family.base, "--method", method, *settings)
    return Contender(label, (*command, *_budget(within), out, *family.experts), lambda: fresh(out))


def mergekit(
    family: Family, method: str, *, dtype: str = "bfloat16", label: str = MERGEKIT, out: Path = OUT / "mergekit"
) -> Contender:
    command = (*PEERS, "benchmarks.peers.mergekit_merge", method, "--base", family.base, "--dtype", dtype)
    return Contender(label, (*command, "--output", out, "--experts", *family.experts), lambda: fresh(out))


def fusionbench(family: Family, method: str, *, out: Path = OUT / "fusionbench") -> Contender:
    command = (*PEERS, "benchmarks.peers.fusionbench_merge", method, "--base", family.base, "--output", out)
    return Contender(FUSIONBENCH, (*command, "--experts", *family.experts), lambda: fresh(out))


def have_peers() -> bool:
    return Path(PEERS[0]).exists()


def workers() -> int:
    return os.cpu_count() or 1
