"""Hundreds of adds in a row, with undos, removals and kills in between; ``python -m tests.faults.soak`` draws them."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from tests.conftest import save_model
from tests.faults import children
from tests.faults.cases import Case
from tests.faults.children import Outcome, command
from tests.faults.scenarios import QUIET, tiny_base
from tests.faults.shim import taken

ADDS = 500
BUILD = Path(__file__).parents[2] / "build"
FIGURE = Path(__file__).parents[2] / "docs" / "results" / "reliability" / "soak.png"
METHODS = ("ledger", "opcm")


def cases(work: Path, adds: int = ADDS) -> Iterator[Case]:
    for method in METHODS:
        yield Case(f"{method}: {adds} adds", partial(soak, method, adds))


def soak(method: str, adds: int, place: Path) -> str | None:
    """What went wrong; how long each add took, and what the store took after it, is kept for the figure."""
    dice, history, measured = random.Random(0), [], []
    save_model(place / "base", tiny_base())
    _run(place, "init", "store", "--base", "base", "--method", method, "--heads", "classifier*")
    for number in range(1, adds + 1):
        expert = _make_expert(place, number)
        if dice.random() < 0.15:
            _kill(place, dice.expovariate(15), "add", "store", expert, *QUIET)
        started = time.monotonic()
        outcome = _run(place, "add", "store", expert, *QUIET)
        already = "absorbed already" in outcome.err  # the kill came too late
        if outcome.fault or (outcome.code and not already):
            return f"add {number}: {outcome.fault or outcome.err.strip()}"
        history.append(expert)
        if not already:
            measured.append((number, len(history), time.monotonic() - started, taken(place / "store")))
        if wrong := _disturb(method, place, dice, history):
            return f"after add {number}: {wrong}"
        if (number % 25 == 0 or number == adds) and (wrong := _unsound(place, history)):
            return f"after add {number}: {wrong}"
    BUILD.mkdir(exist_ok=True)
    (BUILD / f"soak-{method}.json").write_text(json.dumps(measured))
    return _differs_from_undisturbed(method, place, history) if method == "opcm" else None


def _disturb(method: str, place: Path, dice: random.Random, history: list[str]) -> str | None:
    """Now and then the last expert is taken back, or one of a ledger is removed, and that may be killed too."""
    happens = dice.random()
    if happens < 0.08:
        leaving = history[-1]
        words: tuple[str, ...] = ("undo", "store")
    elif happens < 0.12 and method == "ledger":
        leaving = dice.choice(history)
        words = ("remove", "store", leaving)
    else:
        return None
    if dice.random() < 0.5:
        _kill(place, dice.expovariate(30), *words)
    if leaving in _names(place):
        outcome = _run(place, *words)
        if outcome.code or outcome.fault:
            return f"{words[0]}: {outcome.fault or outcome.err.strip()}"
    history.remove(leaving)
    return None


def _unsound(place: Path, history: list[str]) -> str | None:
    verified = _run(place, "verify", "store")
    if verified.code:
        return f"verify: {verified.err.strip()}"
    if _names(place) != history:
        return f"{len(_names(place))} experts, and not {len(history)}"
    return None


def _differs_from_undisturbed(method: str, place: Path, history: list[str]) -> str | None:
    """The last state, against that of the experts which stayed, added one by one."""
    (place / "store").rename(place / "soaked")
    _run(place, "init", "store", "--base", "base", "--method", method, "--heads", "classifier*")
    _run(place, "add", "store", *(_make_expert(place, int(name.partition("-")[2])) for name in history), *QUIET)
    states = [
        json.loads((place / name / "manifest.json").read_text())["history"][-1]["state"] for name in ("store", "soaked")
    ]
    return None if states[0] == states[1] else "the state is not that of the experts which stayed"


def _make_expert(place: Path, number: int) -> str:
    generator = torch.Generator().manual_seed(number)
    changed = {
        name: x + torch.randn(x.shape, generator=generator) * 0.01 if x.is_floating_point() else x
        for name, x in tiny_base().items()
    }
    save_model(place / f"expert-{number}", changed)
    return f"expert-{number}"


def _names(place: Path) -> list[str]:
    return [entry["name"] for entry in json.loads((place / "store" / "manifest.json").read_text())["history"]]


def _run(place: Path, *words: str) -> Outcome:
    return children.run(command(*words), place, 600)


def _kill(place: Path, delay: float, *words: str) -> None:
    child = children.start(command(*words), place)
    child.ended(delay)
    os.kill(child.process, signal.SIGKILL)
    child.wait()


def draw() -> None:
    """Time and size over the adds of the soak."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    seconds, size = figure.subplots(1, 2)
    for method in METHODS:
        adds = json.loads((BUILD / f"soak-{method}.json").read_text())
        seconds.plot([n for _, n, _, _ in adds], [s for _, _, s, _ in adds], ".", markersize=3, label=method)
        size.plot([n for _, n, _, _ in adds], [b / 1e6 for _, _, _, b in adds], ".", markersize=3, label=method)
    seconds.set(xlabel="experts in the store", ylabel="seconds per add", ylim=(0, None))
    size.set(xlabel="experts in the store", ylabel="store (MB)", ylim=(0, None))
    seconds.legend(frameon=False)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=90)


if __name__ == "__main__":
    draw()
