"""The cases of `make bench`, and their targets."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import agreement, cases
from benchmarks.cases import (
    CLI,
    COMMAND,
    FLOOR,
    FUSIONBENCH,
    KERNELS,
    LEDGER,
    MERGEKIT,
    MERGER,
    MERGER_BLOCK,
    OPCM_BLOCK,
    OURS,
    OUT,
    PEERS,
    Case,
    Contender,
)
from benchmarks.checkpoints import CACHE, MODELS, family
from benchmarks.measure import Cost, run
from mergestream import OPCM, Average, Ledger
from mergestream.sizes import parse_size
from mergestream.store.store import Store

STORES = CACHE / "stores"
MEGABYTE = 10**6
PROCESS = 400 * MEGABYTE
"""Memory of a process besides its tensors"""


@dataclass(frozen=True)
class Target:
    """A target and the measured value."""

    work: str
    measured: str
    target: str
    reached: bool | None
    """None if there is no target, only a measurement"""


@dataclass
class Suite:
    repetitions: int
    peer_repetitions: int
    measured: dict[str, dict[str, list[Cost]]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)

    def opcm(self, model: str) -> None:
        """Measure one OPCM step: add the second expert."""
        experts = family(model, 2)
        store = cases.store_with(STORES / f"{model}-opcm", experts, OPCM(alpha=0.5, projection="reference"), 1)
        second = experts.experts[1]
        title = f"one OPCM step, {model}"
        self._measure(
            title,
            cases.add(store, second, 1),
            cases.add_command(store, second, 1),
            cases.merger(experts, "reference", MERGER),
            cases.merger(experts, "block", MERGER_BLOCK),
            cases.kernels(experts),
            *([cases.fusionbench(experts, "opcm")] if cases.have_peers() else []),
        )
        step = self._median(title, OURS, lambda cost: cost.work["wall"])
        command = self._median(title, COMMAND, lambda cost: cost.wall)
        kernels = self._median(title, KERNELS, lambda cost: cost.work["wall"])
        self._judge_above(f"{title} against the bare kernels, all cores (wall)", step, kernels, 1.3)
        if cases.have_peers():
            theirs = self._median(title, FUSIONBENCH, lambda cost: cost.work["steps"][-1])
            in_memory = self._median(title, MERGER, lambda cost: cost.work["wall"])
            block = self._median(title, MERGER_BLOCK, lambda cost: cost.work["wall"])
            self._judge_faster(f"{title}, in memory, against FusionBench's (wall)", theirs, in_memory, 6)
            self._judge_faster(f"{title}, in memory, with the block projection, against the same", theirs, block, 6)
            self._judge_faster(
                f"{title}, our `add` with all its reads and writes against FusionBench's arithmetic alone (wall)",
                theirs,
                step,
                6,
            )
            self._judge_faster(f"{title}, the whole command `mergestream add` against the same", theirs, command, 6)
            self._agree_with_fusionbench(model, store)
        errors = agreement.with_float64_svd(experts, ".layers.0.")
        self._note(
            f"{model}: P(Δ) of a layer's matrices against a float64 full SVD, largest relative error",
            max(errors.values()),
            1e-5,
        )
        self._judge_memory(title, model, OURS)

    def _agree_with_fusionbench(self, model: str, store: Path) -> None:
        title, merged = f"one OPCM step, {model}", OUT / "opcm"
        opened = Store(store)
        opened.export(merged, overwrite=True)
        theirs = self.measured[title][FUSIONBENCH][-1].work["lambda"]
        difference = agreement.with_fusionbench(
            family(model, 2), merged, 1 / opened.history[-1].scale, OUT / "fusionbench", theirs
        )
        self._note(f"{model}: our S₂ against FusionBench's (its SVD is float32), relative difference", difference, 1e-3)

    def sums(self, model: str) -> None:
        """Measure work that should cost no more than reading and writing: add, export, one-shot merges of three."""
        experts = family(model, 3)
        base, third = experts.base, experts.experts[2]
        store = cases.store_with(STORES / f"{model}-average", experts, Average(), 2)
        adding, exporting = f"average, add, {model}", f"average, export, {model}"
        before = cases.previous_state(store, 2)
        self._measure(adding, cases.floor((base, third, before), before), cases.add(store, third, 2))
        after = cases.previous_state(store, 3)
        self._measure(exporting, cases.floor((base, after), base), cases.export(store, OUT / "exported"))
        ours, floor = (
            sum(self._median(title, name, lambda cost: cost.work["cpu"]) for title in (adding, exporting))
            for name in (OURS, FLOOR)
        )
        self._judge_above(f"average, `add` + `export` of one model, {model}, against the floor (CPU)", ours, floor, 1.5)
        for title in (adding, exporting):
            self._record_ratio(f"{title}, against its floor (CPU)", title, OURS, FLOOR)
            self._judge_memory(title, model, OURS)

        title = f"merge of 3 experts, {model}"
        ties = ("mode=streaming", "density=0.2", "scale=1")
        merges = {
            f"{OURS}, task arithmetic": ("task_arithmetic", "scale=0.3"),
            f"{OURS}, TIES per tensor": ("ties", *ties, "trim=tensor"),
            f"{OURS}, TIES over the model": ("ties", *ties, "trim=model"),
        }
        peers = {f"{MERGEKIT}, task arithmetic": "task_arithmetic", f"{MERGEKIT}, TIES": "ties"}
        self._measure(
            title,
            cases.floor((base, *experts.experts), base),
            *(cases.merge(experts, *method, label=label) for label, method in merges.items()),
            *(cases.mergekit(experts, method, label=label) for label, method in peers.items() if cases.have_peers()),
        )
        floor = self._median(title, FLOOR, lambda cost: cost.work["cpu"])
        for name in self.measured[title]:
            cpu = self._median(title, name, lambda cost: cost.work["cpu"])
            work = f"{title}: {name}, against the floor (CPU)"
            if name in merges:
                self._judge_above(work, cpu, floor, 1.5 if "arithmetic" in name else 3)
                self._judge_memory(title, model, name)
            elif name in peers:
                self.targets.append(Target(work, _ratio(cpu, floor), "", None))
        if cases.have_peers():
            for peer, name in zip(peers, (f"{OURS}, task arithmetic", f"{OURS}, TIES over the model"), strict=True):
                theirs, here = (self._median(title, who, lambda cost: cost.work["wall"]) for who in (peer, name))
                self._judge_faster(f"{title}: {name}, against {peer} (wall)", theirs, here, 1)

    def ledger(self, model: str, many: int = 8) -> None:
        """Measure the third `add` to a ledger, OPCM on the same files, and the export of many experts."""
        experts = family(model, many)
        third = experts.experts[2]
        ledger = cases.store_with(STORES / f"{model}-ledger", experts, Ledger(), 2)
        opcm = cases.store_with(STORES / f"{model}-opcm-block", experts, OPCM(projection="block"), 2)
        adding, exporting = f"ledger, add, {model}", f"ledger, export of {many} by agree, {model}"
        self._measure(
            adding,
            cases.ledger_add_kernels(experts.base, third),
            cases.add(ledger, third, 2, label=LEDGER),
            cases.add(opcm, third, 2, label=OPCM_BLOCK),
        )
        cases.fresh(opcm)
        store = Store(ledger)
        for expert in experts.experts[store.manifest.step :]:
            store.add(expert)
        out = OUT / "exported"
        self._measure(exporting, cases.ledger_export_kernels(ledger), cases.export(ledger, out, label=LEDGER))
        for title in (adding, exporting):
            self._judge_clocks(f"{title}, against its bare kernels, all cores", title, LEDGER, KERNELS, 1.5)
        self._judge_clocks(f"{adding}, against OPCM's with the block projection", adding, LEDGER, OPCM_BLOCK, 1)
        for title in (adding, exporting):
            self._judge_memory(title, model, LEDGER)

    def ledger_memory(self, model: str, few: int = 8, many: int = 24) -> None:
        """Measure the peak memory with few and many experts, with a budget for one largest tensor at a time."""
        experts, within = family(model, many), "1.6GB"
        title = f"memory of a ledger that may take {within}, {model}"
        store = cases.store_with(STORES / f"{model}-ledger", experts, Ledger(), 0)
        self.measured[title] = {}
        for number in (few, many):
            opened = Store(store)
            for expert in experts.experts[opened.manifest.step : number - 1]:
                opened.add(expert)
            for contender in (
                cases.add(
                    store, experts.experts[number - 1], number - 1, label=f"add of expert {number}", within=within
                ),
                cases.export(store, OUT / "exported", label=f"export of {number}", within=within),
            ):
                self.measured[title] |= Case(title, (contender,)).measure(1, 0)
                self._judge_peak(title, contender.name, PROCESS + parse_size(within))
        for command in ("add of expert", "export of"):
            small, large = (self._peak(title, f"{command} {number}") for number in (few, many))
            measured = f"{large / small:.2f}× ({large / MEGABYTE:.0f} MB / {small / MEGABYTE:.0f} MB)"
            work = f"{title}: {command} {many} against {command} {few}"
            self.targets.append(Target(work, measured, "≤ 1.1×", large <= 1.1 * small))

    def agreement_with_mergekit(self) -> None:
        """Compare TIES with mergekit where both trim alike: per tensor, in float32, on a small model."""
        experts = family("llama-tiny", 3)
        ties = ("mode=streaming", "trim=tensor", "density=0.2", "scale=1")
        ours, theirs = (
            cases.merge(experts, "ties", *ties, out=OUT / "ties"),
            cases.mergekit(experts, "ties", dtype="float32"),
        )
        for contender in (ours, theirs):
            contender.prepare()
            run(contender.command)
        difference, left_out = agreement.with_mergekit(experts, OUT / "ties", OUT / "mergekit", density=0.2)
        self._note(
            "TIES of 3 experts against mergekit's, relative difference of the task vectors "
            f"({left_out} entries left out: equal magnitudes at the threshold, of which mergekit keeps some)",
            difference,
            1e-5,
        )

    def startup(self) -> None:
        """Measure the most frequent commands, which must not import torch."""
        store = cases.store_with(STORES / "startup", family("llama-tiny", 3), Average(), 1)
        commands: dict[str, cases.Command] = {
            "mergestream --help": (CLI, "--help"),
            "mergestream status": (CLI, "status", store),
        }
        if cases.have_peers():
            commands["mergekit-yaml --help"] = (Path(PEERS[0]).with_name("mergekit-yaml"), "--help")
        for title, command in commands.items():
            self._measure(title, Contender(MERGEKIT if "mergekit" in title else OURS, command))
            (name,) = self.measured[title]
            wall = self._median(title, name, lambda cost: cost.wall)
            ours = name == OURS
            self.targets.append(Target(title, f"{wall:.2f} s", "< 0.5 s" if ours else "", wall < 0.5 if ours else None))

    def _measure(self, title: str, *contenders: Contender) -> None:
        self.measured[title] = Case(title, contenders).measure(self.repetitions, self.peer_repetitions)

    def _median(self, title: str, name: str, figure: Callable[[Cost], float]) -> float:
        return statistics.median(figure(cost) for cost in self.measured[title][name])

    def _judge_above(self, work: str, ours: float, limit: float, most: float) -> None:
        self.targets.append(Target(work, _ratio(ours, limit), f"≤ {most}×", ours <= most * limit))

    def _judge_clocks(self, work: str, title: str, ours: str, limit: str, most: float) -> None:
        """Compare by wall time, and by CPU time, which other load changes less."""
        clocks: dict[str, Callable[[Cost], float]] = {
            "wall": lambda cost: cost.work["wall"],
            "CPU": lambda cost: cost.work["cpu"],
        }
        for clock, figure in clocks.items():
            a, b = (self._median(title, who, figure) for who in (ours, limit))
            self._judge_above(f"{work} ({clock})", a, b, most)

    def _judge_faster(self, work: str, theirs: float, ours: float, least: float) -> None:
        measured = f"{theirs / ours:.1f}× faster ({theirs:.2f} s / {ours:.2f} s)"
        self.targets.append(Target(work, measured, f"≥ {least}×", theirs >= least * ours))

    def _record_ratio(self, work: str, title: str, ours: str, limit: str) -> None:
        a, b = (self._median(title, name, lambda cost: cost.work["cpu"]) for name in (ours, limit))
        self.targets.append(Target(work, _ratio(a, b), "", None))

    def _note(self, work: str, error: float, most: float) -> None:
        self.targets.append(Target(work, f"{error:.1e}", f"≤ {most:.0e}", error <= most))

    def _judge_memory(self, title: str, model: str, name: str) -> None:
        """Check that memory is ≤ 400 MB + 6 × the largest tensor in float32 × workers."""
        largest = 4 * max(map(math.prod, MODELS[model].tensors.values()))
        self._judge_peak(title, name, PROCESS + 6 * largest * cases.workers())

    def _judge_peak(self, title: str, name: str, allowed: float) -> None:
        peak = self._peak(title, name)
        self.targets.append(
            Target(
                f"{title}: {name}, peak anonymous memory",
                f"{peak / MEGABYTE:.0f} MB",
                f"≤ {allowed / MEGABYTE:.0f} MB",
                peak <= allowed,
            )
        )

    def _peak(self, title: str, name: str) -> int:
        return max(cost.anonymous for cost in self.measured[title][name])


def _ratio(ours: float, limit: float) -> str:
    return f"{ours / limit:.2f}× ({ours:.2f} s / {limit:.2f} s)"


def announce(text: str) -> None:
    print(f"── {text}", file=sys.stderr, flush=True)


def as_json(suite: Suite) -> dict[str, Any]:
    return {
        "measurements": {
            title: {name: [vars(cost) for cost in costs] for name, costs in contenders.items()}
            for title, contenders in suite.measured.items()
        },
        "targets": [vars(target) for target in suite.targets],
    }
