"""Several processes at one store, processes that may not write, and processes that may have little of something."""

from __future__ import annotations

import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.conftest import files
from tests.faults import children
from tests.faults.cases import Case
from tests.faults.children import Outcome, command
from tests.faults.scenarios import QUIET, content, make_toys

ROUNDS = 40
"""Of each race, with other delays"""
BUSY = 3
NOBODY = 65534
MEGABYTE = 1 << 20


def cases(work: Path) -> Iterator[Case]:
    for directory in (work.parent, work):  # others are to read in it
        directory.chmod(0o755)
    toys = make_toys(work / "toys")
    for method in ("opcm", "ledger"):
        start = work / method
        _must(command("init", start, "--base", toys / "base", "--method", method, "--keep", "2"), work)
        _must(command("add", start, toys / "expert-1", toys / "expert-2", *QUIET), work)
        for race in (two_writers, readers_beside_a_writer, export_beside_undo, watch_beside_add):
            for seed in range(ROUNDS):
                yield Case(f"{method}: {race.__name__} {seed}", partial(race, start, toys, random.Random(seed)))
        for words in _READING:
            yield Case(f"{method}: read-only {words[0]}", partial(read_only, start, toys, words, True))
        for words in _WRITING:
            yield Case(f"{method}: read-only {words[0]}", partial(read_only, start, toys, words, False))
        for limit, amounts in _LIMITS.items():
            for amount in amounts:
                for words in (*_WRITING, *_READING):
                    name = f"{method}: {words[0]} with {limit} of {amount}"
                    yield Case(name, partial(limited, start, toys, words, limit, amount))


_READING = (
    ("status", "store"),
    ("log", "store"),
    ("verify", "store"),
    ("inspect", "store", "TOYS/expert-3"),
    ("export", "store", "OUT/model", *QUIET),
    ("report", "store", "-o", "OUT/report.md", "--format", "md"),
)
_WRITING = (("add", "store", "TOYS/expert-3", *QUIET), ("undo", "store"))
_LIMITS = {
    "RLIMIT_FSIZE": (2_000, 10_000, 50_000, 200_000, 400_000),  # messages are in a file too
    "RLIMIT_AS": (1, 4, 16, 64, 256),
    "RLIMIT_NOFILE": (16, 20, 24, 32),
}


def _must(act: Callable[[], int], place: Path) -> Outcome:
    outcome = children.run(act, place)
    assert outcome.code == 0, outcome
    return outcome


def _sound(place: Path, absorbed: set[str] | None = None) -> str | None:
    """What is wrong with a store that nobody works on any more, if anything."""
    verified = children.run(command("verify", "store"), place)
    if verified.code:
        return f"verify: {verified.err.strip()}"
    found = content(place)["store"]
    names = {entry["name"] for entry in found["history"]}
    if absorbed is not None and names != absorbed:
        return f"the store has {sorted(names)} and not {sorted(absorbed)}"
    return None


def _nothing_left(place: Path, toys: Path) -> str | None:
    """After one more command."""
    outcome = children.run(command("add", "store", toys / "expert-9", *QUIET), place)
    if outcome.code:
        return f"add afterwards: {outcome.err.strip()}"
    left = content(place)["left"]
    return f"left over: {left}" if left else None


# --- races --------------------------------------------------------------------------------------------------


def two_writers(start: Path, toys: Path, dice: random.Random, place: Path) -> str | None:
    shutil.copytree(start, place / "store")
    writers = {}
    for number in (3, 4):
        act = command("add", "store", toys / f"expert-{number}", *QUIET)
        writers[f"expert-{number}"] = children.start(_after(dice.uniform(0, 0.1), act), place)
    outcomes = {name: writer.wait() for name, writer in writers.items()}
    for outcome in outcomes.values():
        if outcome.fault or outcome.code not in (0, BUSY):
            return outcome.fault or outcome.err.strip()
    done = {name for name, outcome in outcomes.items() if outcome.code == 0}
    if not done:
        return "neither got the store"
    return _sound(place, {"expert-1", "expert-2", *done}) or _nothing_left(place, toys)


def readers_beside_a_writer(start: Path, toys: Path, dice: random.Random, place: Path) -> str | None:
    shutil.copytree(start, place / "store")
    writer = children.start(_writing(toys, dice.uniform(0, 0.05)), place)
    words = [dice.choice(_READING) for _ in range(2)]
    readers = []
    for number, reading in enumerate(words):
        (place / f"{number}").mkdir()
        act = _after(dice.uniform(0, 0.2), _filled(reading, toys, place / f"{number}"))
        readers.append(children.start(act, place))
    for reading, reader in zip(words, readers, strict=True):
        outcome = reader.wait()
        if outcome.fault or outcome.code:
            return f"{reading[0]}: {outcome.fault or outcome.err.strip()}"
    written = writer.wait()
    return written.fault or written.err.strip() or _sound(place) or _nothing_left(place, toys)


def _writing(toys: Path, delay: float) -> Callable[[], int]:
    """Adds and undos, one after another; at least one expert stays."""
    add, undo = ("add", "store", toys / "expert-3", *QUIET), ("undo", "store")

    def act() -> int:
        for words in (add, undo, undo, add, undo):
            time.sleep(delay)
            command(*words)()
        return command("add", "store", toys / "expert-5", *QUIET)()

    return act


def export_beside_undo(start: Path, toys: Path, dice: random.Random, place: Path) -> str | None:
    """What is exported belongs to one step: the weights, the card and what the card shows."""
    shutil.copytree(start, place / "store")
    whole = {}
    for experts in (2, 1):
        out = place / f"of-{experts}"
        _must(command("export", "store", out, *QUIET), place)
        whole[experts] = _model(out)
        if experts == 2:
            shutil.copytree(place / "store", place / "again")
            _must(command("undo", "store"), place)
    shutil.rmtree(place / "store")
    (place / "again").rename(place / "store")
    exporting = children.start(command("export", "store", "out", *QUIET), place)
    undoing = children.start(_after(dice.expovariate(8), command("undo", "store")), place)
    exported, undone = exporting.wait(), undoing.wait()
    for outcome in (exported, undone):
        if outcome.fault or outcome.code:
            return outcome.fault or outcome.err.strip()
    if _model(place / "out") not in whole.values():
        return "the export is of neither step"
    return _sound(place, {"expert-1"}) or _nothing_left(place, toys)


def _model(out: Path) -> dict[str, bytes]:
    """All but the name of the place that the card has in its command."""
    return {name: data.replace(os.fsencode(out), b"out") for name, data in files(out).items()}


def watch_beside_add(start: Path, toys: Path, dice: random.Random, place: Path) -> str | None:
    from tests.faults.scenarios import watch

    shutil.copytree(start, place / "store")
    incoming = place / "incoming"
    shutil.copytree(toys / "expert-7", incoming / "expert-7")
    watching = children.start(lambda: watch(str(incoming), looks=20, seconds=0.05), place)
    adding = children.start(_after(dice.uniform(0, 0.3), command("add", "store", toys / "expert-8", *QUIET)), place)
    outcomes = [adding.wait(), watching.wait()]
    for outcome in outcomes:
        if outcome.fault or outcome.code not in (0, BUSY):
            return outcome.fault or outcome.err.strip()
    added = {"expert-8"} if outcomes[0].code == 0 else set()
    return _sound(place, {"expert-1", "expert-2", "expert-7", *added}) or _nothing_left(place, toys)


def _after(delay: float, act: Callable[[], int]) -> Callable[[], int]:
    def call() -> int:
        time.sleep(delay)
        return act()

    return call


# --- what a process may not do ------------------------------------------------------------------------------


def _filled(words: Sequence[str], toys: Path, out: Path) -> Callable[[], int]:
    return command(*(word.replace("TOYS", str(toys)).replace("OUT", str(out)) for word in words))


def read_only(start: Path, toys: Path, words: Sequence[str], works: bool, place: Path) -> str | None:
    """As a user who may read the store and nothing more."""
    store, out = place / "store", place / "theirs"
    shutil.copytree(start, store)
    before = files(store)
    out.mkdir()
    if os.getuid() == 0:
        os.chown(out, NOBODY, NOBODY)

    def act() -> int:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return _filled(words, toys, out)()

    for directory in (store, *(path for path in store.rglob("*") if path.is_dir())):
        directory.chmod(0o555)
    for directory in (place.parent.parent, place.parent, place):
        directory.chmod(0o755)
    outcome = children.run(act, place)
    for directory in (store, *(path for path in store.rglob("*") if path.is_dir())):
        directory.chmod(0o755)
    if outcome.fault or (outcome.code != 0) == works:
        return outcome.fault or f"exit code {outcome.code}: {outcome.err.strip()}"
    return None if files(store) == before else "the store is not what it was"


def limited(start: Path, toys: Path, words: Sequence[str], limit: str, amount: int, place: Path) -> str | None:
    """It is done, or it says in one sentence what it lacks; then it works without the limit."""
    shutil.copytree(start, place / "store")
    (place / "out").mkdir()

    def act() -> int:
        kind = getattr(resource, limit)
        bound = amount
        if limit == "RLIMIT_AS":
            bound = amount * MEGABYTE + mapped()
        resource.setrlimit(kind, (bound, bound))
        return _filled(words, toys, place / "out")()

    outcome = children.run(act, place)
    if outcome.fault:
        return outcome.fault
    if limit == "RLIMIT_FSIZE" and "make room" in outcome.err:
        return f"a limit is not a full disk: {outcome.err.strip()}"
    if wrong := _sound(place):
        return wrong
    again = children.run(_filled(words, toys, place / "out"), place) if outcome.code else outcome
    return again.fault or (again.err.strip() if again.code else None) or _nothing_left(place, toys)


def mapped() -> int:
    """Bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
