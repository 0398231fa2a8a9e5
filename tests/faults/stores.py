"""Small stores of every kind of file, and commands that are run on them in this process."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch

from mergestream import OPCM, Average, Inputs, Ledger, LocalEngine, Store
from mergestream.cli import main
from tests.conftest import save_model, toy_base, toy_expert
from tests.handmade import handmade_adapter

ADAPTED = {"layers.0.q": (8, 8), "wide": (40, 24)}
"""Of the second an adapter is smaller than the weight, so that it is kept in factors"""


class Outcome(NamedTuple):
    """How a command has ended."""

    code: int
    out: str
    err: str

    @property
    def fault(self) -> str | None:
        """What is wrong with it, if anything: an error is one sentence."""
        errors = [line for line in self.err.splitlines() if line.startswith("error: ")]
        if self.code == 0:
            return None
        if self.code not in (1, 2) or len(errors) != 1 or "Traceback" in self.err:
            return f"it ended with {self.code} and {self.err!r}"
        return None


def command(*words: object) -> Outcome:
    """A command line; what it raises is a fault that nobody has foreseen."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main([*map(str, words), *(("--quiet",) if words[0] not in ("status", "log") else ())])
    except SystemExit as exit:
        code = int(exit.code or 0)
    except Exception as error:
        return Outcome(70, out.getvalue(), f"{type(error).__name__}: {error}")
    return Outcome(code, out.getvalue(), err.getvalue())


class Made(NamedTuple):
    """A store with two experts, and a third that may be added."""

    path: Path
    third: Path


def make_stores(work: Path) -> Sequence[Made]:
    """A state with heads, a ledger, and slots in factors that two steps share; all of them with scores."""
    base = {**toy_base(), "wide.weight": torch.randn(40, 24, generator=torch.Generator().manual_seed(9))}
    place = save_model(work / "base", {**base, "head.weight": torch.ones(2, 3)})
    experts = []
    for number in (1, 2, 3):
        tensors = {**toy_expert(number, base), "head.weight": torch.full((2, 3), float(number))}
        experts.append(save_model(work / "experts" / str(number), tensors))
    adapters = [handmade_adapter(work / "loras" / str(number), number, modules=ADAPTED) for number in (1, 2, 3)]
    contents = {
        "opcm": (OPCM(), experts),
        "ledger": (Ledger(), [experts[0], adapters[0], experts[2]]),
        "adapters": (Average(), adapters),
    }
    stores = []
    for name, (method, models) in contents.items():
        heads = ["head.*"] if name == "opcm" else []
        store = Store.create(work / name, place, method, heads=heads, engine=LocalEngine(workers=1))
        for number, model in enumerate(models[:2], 1):
            store.add(model, f"expert-{number}")
        store.attach_scores(["one", "two"], [[0.5, 0.25], [0.75, 0.5]])
        (store.path / "lock").unlink()
        stores.append(Made(store.path, models[2]))
    return stores


def make_measured(work: Path) -> Made:
    """A ledger whose experts were run on inputs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 16))
    given = Inputs([torch.randn(5, 16) for _ in range(20)], model=model)
    base, *experts = (work / "measured" / name for name in ("base", "expert-1", "expert-2", "expert-3"))
    for place in (base, *experts):
        save_model(place, {name: value + 0.01 * torch.randn_like(value) for name, value in model.state_dict().items()})
    store = Store.create(work / "inputs", base, Ledger(budget=8.0), engine=LocalEngine(workers=1))
    for expert in experts[:2]:
        store.add(expert, inputs=given)
    (store.path / "lock").unlink()
    return Made(store.path, experts[2])
