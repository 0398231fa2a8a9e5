"""Sessions that are disturbed: what is there before, the command, what comes after it, and what it amounts to."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mergestream import Inputs
from tests.conftest import files, save_model
from tests.faults import children
from tests.handmade import handmade_adapter

Words = Sequence[str]
EXPERTS, ADAPTERS = 18, 3
QUIET = ("--quiet", "--workers", "1")
_VOLATILE = ("added", "seconds", "number", "cut")
"""What may differ between two stores of the same experts. An entry that could not be shortened is shortened by the next
add, for one expert more than it would have been."""


def tiny_base() -> dict[str, Tensor]:
    """As few tensors as show everything: whole and elementwise, copied, a head, and one whose entries are shortened."""
    generator = torch.Generator().manual_seed(0)
    return {
        "layers.0.q.weight": torch.randn(16, 16, generator=generator) * 0.1,
        "layers.0.norm.weight": torch.randn(16, generator=generator) + 1,
        "classifier.weight": torch.randn(2, 16, generator=generator),
        "position_ids": torch.arange(4),
    }


def make_toys(place: Path) -> Path:
    """A base, experts of it and adapters for it, each a directory."""
    base = tiny_base()
    save_model(place / "base", base)
    (place / "base" / "config.json").write_text(json.dumps({"model_type": "toy", "hidden_size": 16}))
    for number in range(1, EXPERTS + 1):
        generator = torch.Generator().manual_seed(number)
        changed = {
            name: x + torch.randn(x.shape, generator=generator) * 0.01 * (1 + number % 4)
            if x.is_floating_point()
            else x
            for name, x in base.items()
        }
        save_model(place / f"expert-{number}", changed)
    for number in range(1, ADAPTERS + 1):
        handmade_adapter(
            place / f"adapter-{number}",
            seed=number,
            modules={"layers.0.q": (16, 16)},
            base_model_name_or_path=str(place / "base"),
        )
    shutil.copytree(place / "base", place / "moved-base")
    shutil.copytree(place / "expert-2", place / "incoming" / "expert-2")
    for path in place.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors leaves them to their owner
    return place


@dataclass(frozen=True)
class Scenario:
    """A command that is disturbed, in a directory with ``store`` and ``out``; TOYS stands for where the models are."""

    name: str
    setup: Sequence[Words]
    command: Words
    following: Words
    exchanges: bool = True
    """Whether the system lets two names change places"""

    def run(self, words: Words, toys: Path) -> Callable[[], int]:
        """One of its commands, to be run in a child."""
        words = [word.replace("TOYS", str(toys)) for word in words]
        if words[0] in _OTHERS:
            return partial(_OTHERS[words[0]], *words[1:])
        return children.command(*words)


def _init(method: str, *options: str) -> Words:
    return ("init", "store", "--base", "TOYS/base", "--method", method, "--heads", "classifier*", *options, *QUIET)


def _add(*experts: str) -> Words:
    return ("add", "store", *(f"TOYS/{expert}" for expert in experts), *QUIET)


def _experts(first: int, last: int) -> list[str]:
    return [f"expert-{number}" for number in range(first, last + 1)]


_export = ("export", "store", "out", *QUIET)
_merge = ("merge", "--base", "TOYS/base", "TOYS/expert-1", "TOYS/expert-2", "-o", "out", *QUIET)
_replace = ("--overwrite",)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("init", [], _init("ledger"), _add("expert-1")),
        Scenario("add", [_init("opcm"), _add(*_experts(1, 2))], _add("expert-3"), _add("expert-4")),
        Scenario("add to a ledger", [_init("ledger"), _add("expert-1")], _add("expert-2"), _add("expert-3")),
        Scenario("add an adapter", [_init("opcm"), _add("adapter-1")], _add("adapter-2"), _add("adapter-3")),
        Scenario(
            "add an adapter to a ledger", [_init("ledger"), _add("expert-1")], _add("adapter-2"), _add("expert-3")
        ),
        Scenario("add and shorten", [_init("ledger"), _add(*_experts(1, 15))], _add("expert-16"), _add("expert-17")),
        Scenario("undo", [_init("opcm"), _add(*_experts(1, 2))], ("undo", "store"), _add("expert-3")),
        Scenario("undo in a ledger", [_init("ledger"), _add(*_experts(1, 2))], ("undo", "store"), _add("expert-3")),
        Scenario(
            "remove", [_init("ledger"), _add(*_experts(1, 3))], ("remove", "store", "expert-2"), _add("expert-4")
        ),
        Scenario(
            "undo a removal",
            [_init("ledger"), _add(*_experts(1, 3)), ("remove", "store", "expert-2")],
            ("undo", "store"),
            _add("expert-4"),
        ),
        Scenario(
            "calibrate", [_init("ledger"), _add(*_experts(1, 2))], ("measure", "expert-1"), ("measure", "expert-2")
        ),
        Scenario(
            "calibrate again",
            [_init("ledger"), _add("expert-1"), ("measure", "expert-1")],
            ("measure", "expert-1"),
            _add("expert-2"),
        ),
        Scenario("export", [_init("opcm"), _add(*_experts(1, 2))], _export, (*_export, *_replace)),
        Scenario(
            "export over another",
            [_init("opcm"), _add("expert-1"), _export, _add("expert-2")],
            (*_export, *_replace),
            (*_export, *_replace, "--scale", "0.5"),
        ),
        Scenario(
            "export over another by two renames",
            [_init("opcm"), _add("expert-1"), _export, _add("expert-2")],
            (*_export, *_replace),
            (*_export, *_replace, "--scale", "0.5"),
            exchanges=False,
        ),
        Scenario(
            "export a ledger over another",
            [_init("ledger"), _add("expert-1"), _export, _add("expert-2")],
            (*_export, *_replace, "--task", "expert-1"),
            (*_export, *_replace, "--readout", "sum"),
        ),
        Scenario(
            "export an adapter over another",
            [_init("opcm"), _add("adapter-1"), (*_export, "--format", "lora"), _add("adapter-2")],
            (*_export, *_replace, "--format", "lora"),
            (*_export, *_replace, "--format", "lora", "--rank", "1"),
        ),
        Scenario(
            "export all adapters over another",
            [_init("ledger"), _add("adapter-1"), (*_export, "--format", "loras"), _add("adapter-2")],
            (*_export, *_replace, "--format", "loras"),
            (*_export, *_replace, "--format", "loras", "--rank", "1"),
        ),
        Scenario("merge", [], (*_merge, "--method", "average"), (*_merge, *_replace, "--method", "average")),
        Scenario(
            "merge through a store",
            [(*_merge, "--method", "average")],
            (*_merge, *_replace, "--method", "opcm"),
            (*_merge, *_replace, "--method", "average"),
        ),
        Scenario("watch", [_init("opcm"), _add("expert-1")], ("watch", "TOYS/incoming"), _add("expert-3")),
        Scenario("attach scores", [_init("opcm"), _add("expert-1")], ("attach", "0.5"), ("attach", "0.75")),
        Scenario(
            "move the base", [_init("opcm"), _add("expert-1")],
            ("relocate", "TOYS/moved-base"), _add("expert-2"),
        ),
    )
}  # fmt: skip


def watch(directory: str, looks: int = 2, seconds: float = 0) -> int:
    """So many looks; what has not changed between two of them is complete."""
    left = iter(range(looks))

    def pause(_: float) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        wait(seconds)

    wait = time.sleep
    with patch("mergestream.cli.watch.time.sleep", pause):
        return children.command("watch", "store", directory, *QUIET)()


def _attach(score: str) -> int:
    return _in_python(lambda store: store.attach_scores(["a"], [[float(score)]]))


def _relocate(base: str) -> int:
    return _in_python(lambda store: store.relocate(base))


def _measure(expert: str) -> int:
    torch.manual_seed(0)
    layer = torch.nn.ModuleDict({"q": torch.nn.Linear(16, 16, bias=False)})
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    samples = [torch.randn(3, 16) for _ in range(8)]
    inputs = Inputs(samples, model=model, call=lambda model, x: model.get_submodule("layers.0.q")(x))
    return _in_python(lambda store: store.calibrate(expert, inputs))


def _in_python(act: Callable[[Any], object]) -> int:
    """What there is no command for, or only one that does more."""
    from mergestream import LocalEngine, MergestreamError, Store
    from mergestream.cli import INTERRUPTED

    warnings.simplefilter("ignore")  # that something could not be tidied up
    for number in (signal.SIGINT, signal.SIGTERM):  # as a program does that minds them
        signal.signal(number, signal.default_int_handler)
    try:
        act(Store("store", engine=LocalEngine(1)))
    except (MergestreamError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # in Python that is the caller's to tell
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


_OTHERS: dict[str, Callable[..., int]] = {"watch": watch, "attach": _attach, "relocate": _relocate, "measure": _measure}


# --- what it amounts to -------------------------------------------------------------------------------------


def content(place: Path) -> dict[str, Any]:
    """All that is to be the same after a disturbed session: the store by expert, outputs by file, and what is left."""
    out, aside = place / "out", place / ".out.mergestream" / "replaced"
    if not out.is_dir() and aside.is_dir():  # between two renames; the next export puts it back
        out = aside
    found: dict[str, Any] = {
        "names": sorted(path.name for path in place.iterdir()),
        "out": files(out) if out.is_dir() else None,
        "store": None,
        "left": [],
    }
    store = place / "store"
    if (store / "manifest.json").is_file():
        found["store"], found["left"] = _store_content(store)
    return found


def _store_content(store: Path) -> tuple[dict[str, Any], list[str]]:
    manifest = json.loads((store / "manifest.json").read_text())
    manifest.pop("digest")
    known = {"manifest.json", "lock", "scores.json", "steps", "experts", "inputs"}
    removed = manifest.get("removed", [])
    for removal in removed:
        del removal["time"]
    for entry in (*manifest["history"], *(removal["expert"] for removal in removed)):
        number = f"{entry['number']:04d}"
        for part in ("steps", "experts"):
            known.add(f"{part}/{number}")
            held = files(store / part / number)
            entry[part] = {name: data for name, data in held.items() if name not in ("plan.json", "journal")}
            known |= {f"{part}/{number}/{name}" for name in entry[part]}
        inputs = entry.get("inputs")
        while inputs:  # those that they replaced, too
            folder = f"inputs/{inputs['number']:04d}"
            entry[folder] = files(store / folder)
            known |= {folder, *(f"{folder}/{name}" for name in entry[folder])}
            inputs = inputs.get("before")
        for key in _VOLATILE:
            entry.pop(key, None)
    if (store / "scores.json").is_file():
        manifest["scores"] = (store / "scores.json").read_bytes()
    everything = {str(path.relative_to(store)) for path in store.rglob("*")}
    return manifest, sorted(everything - known)


def state(place: Path) -> dict[str, Any]:
    """The content but for what is left over, which the next command removes."""
    return {key: value for key, value in content(place).items() if key in ("store", "out")}


@dataclass(frozen=True)
class Prepared:
    """A scenario that was run undisturbed: where it starts, and what it comes to."""

    scenario: Scenario
    toys: Path
    start: Path
    before: dict[str, Any]
    after: dict[str, Any]
    following: dict[str, Any]
    calls: Sequence[Any]
    """The changes of the command, and the files that it opened"""
    kinds: Sequence[str]
    reads: int
    most_taken: int
    """Bytes on the disk while it ran"""


def difference(found: Any, expected: Any, path: str = "") -> str:
    """Where two contents differ first."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted({*found, *expected}):
            if found.get(key) != expected.get(key):
                return difference(found.get(key), expected.get(key), f"{path}/{key}")
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            if one != other:
                return difference(one, other, f"{path}/{number}")
    return f"{path} is {found!r:.80} and not {expected!r:.80}"
