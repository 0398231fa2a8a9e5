"""One bit is flipped in a file of a store: the next command that reads it says so, and makes nothing of it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.conftest import files
from tests.faults.cases import Case
from tests.faults.stores import Made, Outcome, command, make_stores

ANYWHERE, IN_HEADER = 40, 24
"""Flips in every file, and in the header of one that has a header"""


def cases(work: Path) -> Iterator[Case]:
    for made in make_stores(work):
        expected = {}
        for name, run in COMMANDS.items():
            outcome, expected[name] = run(Made(shutil.copytree(made.path, work / "copy"), made.third), work / "out")
            assert outcome.code == 0, outcome.err
            shutil.rmtree(work / "copy")
            shutil.rmtree(work / "out", ignore_errors=True)
        for path in sorted(made.path.rglob("*")):
            file = path.relative_to(made.path)
            for position in _positions(path) if path.is_file() else ():
                yield Case(f"{made.path.name}/{file} at {position}", partial(_try, made, file, position, expected))


def _positions(path: Path) -> list[int]:
    data, dice = path.read_bytes(), random.Random(path.name)
    header = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
    anywhere = [dice.randrange(len(data)) for _ in range(ANYWHERE)]
    return sorted({*anywhere, *(dice.randrange(header) for _ in range(IN_HEADER))})


def _try(made: Made, file: Path, position: int, expected: Mapping[str, Any], place: Path) -> str | None:
    store = shutil.copytree(made.path, place / "store")
    data = bytearray((store / file).read_bytes())
    data[position] ^= 1 << position % 8
    (store / file).write_bytes(data)
    if meaning(store / file) != meaning(made.path / file) and command("verify", store).code != 1:
        return "verify has not found it"
    before = files(store)
    for name, run in COMMANDS.items():
        outcome, made_of_it = run(Made(store, made.third), place / "out")
        if fault := outcome.fault:
            return f"{name}: {fault}"
        if outcome.code == 0 and made_of_it != expected[name]:
            return f"{name} has made something of it"
        if outcome.code and str((store / file).parent) not in outcome.err:
            return f"{name} does not say where the damage is: {outcome.err}"
        if outcome.code and (place / "out").exists():
            return f"{name} has left an output"
        if outcome.code and {**files(store), "lock": b""} != {**before, "lock": b""}:
            return f"{name} has failed and changed the store"
        shutil.rmtree(place / "out", ignore_errors=True)
    return None


def meaning(path: Path) -> object:
    """What a file says: a flipped bit may write an exponent's e as E, or hit the free text in a header."""
    data = path.read_bytes()
    try:
        if path.name == "tensors.json":  # whose digest is that of the text
            return data
        if path.suffix == ".json":
            return json.loads(data)
        header = 8 + int.from_bytes(data[:8], "little")
        return {**json.loads(data[8:header]), "__metadata__": None}, data[header:]
    except ValueError:
        return None


def _export(made: Made, out: Path) -> tuple[Outcome, object]:
    has_head = (made.path / "experts/0002/heads.safetensors").exists()
    outcome = command("export", made.path, out, *(("--task", "expert-2") if has_head else ()))
    return outcome, files(out, ".safetensors")


def _printed(*words: object) -> Callable[[Made, Path], tuple[Outcome, object]]:
    """A command that prints, but for where the store is."""

    def run(made: Made, out: Path) -> tuple[Outcome, object]:
        outcome = command(words[0], made.path, *words[1:])
        return outcome, outcome.out.replace(str(made.path), "store")

    return run


def _inspect(made: Made, out: Path) -> tuple[Outcome, object]:
    outcome = command("inspect", made.path, made.third, "--json")
    return outcome, {**json.loads(outcome.out), "seconds": None} if outcome.code == 0 else None


def _add(made: Made, out: Path) -> tuple[Outcome, object]:
    outcome = command("add", made.path, made.third, "--gate", "kept>=0")
    return outcome, {path.name: meaning(path) for path in sorted((made.path / "steps/0003").glob("*.*"))}


COMMANDS: dict[str, Callable[[Made, Path], tuple[Outcome, object]]] = {
    "status": _printed("status"),
    "log": _printed("log"),
    "diff": _printed("diff", "1", "2"),
    "report": _printed("report", "--format", "json"),
    "inspect": _inspect,
    "export": _export,
    "add": _add,
}
"""Each tells how it has ended, and what it has made; the last is the one that writes"""
