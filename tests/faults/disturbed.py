"""Families of cases in which a command is disturbed: calls that fail, kills, power cuts, disks that are full."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults import children
from tests.faults.cases import Case
from tests.faults.children import Outcome
from tests.faults.power import VARIANTS, after_cut, saved
from tests.faults.scenarios import SCENARIOS, Prepared, Scenario, Words, content, difference, make_toys, state
from tests.faults.shim import SIGNALS, WAYS, Fault, Shim, taken

PLACE = "place"
"""Where a case works: of the same name everywhere, so that names in messages and cards are the same"""
INTERRUPTED = (130, 143)
"""Exit codes of a command that got a signal. Whether it was done is in what it says."""
KILLS = 8
LOCK = 64
"""Bytes that say who holds the lock"""


def prepare(scenario: Scenario, toys: Path, work: Path) -> Prepared:
    """Run a scenario undisturbed."""
    place, start = work / PLACE, work / "start"
    place.mkdir(parents=True)
    for words in scenario.setup:
        _done(children.run(scenario.run(words, toys), place), words)
    shutil.copytree(place, start)
    before = state(place)
    shim = Shim(place, toys, room=sys.maxsize, exchanges=scenario.exchanges)

    def watched() -> tuple[Any, ...]:
        shim.install()
        code = scenario.run(scenario.command, toys)()
        return code, shim.calls, shim.kinds, shim.counted[True], shim.most_taken

    outcome = children.run(watched, place)
    _done(outcome, scenario.command)
    code, calls, kinds, reads, most = outcome.result
    assert code == 0, outcome
    after = state(place)
    _done(children.run(scenario.run(scenario.following, toys), place), scenario.following)
    return Prepared(scenario, toys, start, before, after, content(place), calls, kinds, reads, most)


def warm(work: Path) -> None:
    """Have all modules imported, so that no child needs to: run every scenario in this process."""
    toys = make_toys(work / "toys")
    home = Path.cwd()
    for scenario in SCENARIOS.values():
        place = work / scenario.name
        place.mkdir()
        os.chdir(place)
        try:
            looks = ((word, "store") for word in ("verify", "status", "log", "report"))
            for words in (*scenario.setup, scenario.command, *looks, ("inspect", "store", "TOYS/expert-9")):
                in_process(scenario, words, toys)
        finally:
            os.chdir(home)


def _done(outcome: Outcome, words: Words) -> None:
    assert outcome.code == 0 and not outcome.fault, (words, outcome)


def examine(prepared: Prepared, place: Path, outcome: Outcome | None, finished: bool = False) -> str | None:
    """What is wrong after a command was disturbed, if anything.

    It ended well or with one sentence; what it says is what is there, which is what was there before or what was to
    be; ``verify`` passes; going on comes to what it comes to undisturbed, and nothing is left over.
    ``finished`` is for a power cut after the command.
    """
    scenario = prepared.scenario
    if outcome and outcome.fault:
        return outcome.fault
    found = state(place)
    if not _is_before(found, prepared) and not _is_after(found, prepared):
        return f"neither before nor after: {difference(found, prepared.after)}"
    if wrong := _inconsistent(prepared, found, outcome, finished):
        return wrong
    rounds: list[Words] = [("verify", "store")] if found["store"] else []
    if not _is_after(found, prepared):
        rounds.append(scenario.command)
    for words in (*rounds, scenario.following):
        done = in_process(scenario, words, prepared.toys)
        if done.code or done.fault:
            return f"{words[0]} afterwards: {done.fault or done.err.strip()}"
        if words is scenario.command and not _is_after(state(place), prepared):
            return f"going on comes to something else: {difference(state(place), prepared.after)}"
    last = content(place)
    return None if last == prepared.following else f"after the next command: {difference(last, prepared.following)}"


def _inconsistent(prepared: Prepared, found: dict[str, Any], outcome: Outcome | None, finished: bool) -> str | None:
    """Where what a command says is not what it did."""
    watches = prepared.scenario.name == "watch"  # which goes on, whatever becomes of an expert
    if outcome and not outcome.was_killed and not watches:
        finished = outcome.code == 0
        told = outcome.code in INTERRUPTED and "as it was" not in outcome.err
        if not finished and not told and not _is_before(found, prepared):
            return f"done, and yet an error: {outcome.err.strip()}"
    if finished and not _is_after(found, prepared):
        return f"it said that it was done, and is not: {difference(found, prepared.after)}"
    return None


def _is_before(found: dict[str, Any], prepared: Prepared) -> bool:
    return bool(found == prepared.before)


def _is_after(found: dict[str, Any], prepared: Prepared) -> bool:
    """As it was to be. Entries may be longer than they need be, and of two experts the first may be in the store."""
    return bool(found == prepared.after) or _names(found) == _names(prepared.after) != _names(prepared.before)


def _names(found: dict[str, Any]) -> list[str] | None:
    return found["store"] and [entry["name"] for entry in found["store"]["history"]]


def in_process(scenario: Scenario, words: Words, toys: Path) -> Outcome:
    """A command in this process, which belongs to the case."""
    return children.in_process(scenario.run(words, toys))


# --- the families -------------------------------------------------------------------------------------------


def failing_calls(prepared: Sequence[Prepared]) -> Iterator[Case]:
    """Every change and every read of every scenario, failing in every way that it can."""
    for one in prepared:
        faults = [Fault(i, way) for i, kind in enumerate(one.kinds, 1) for way in WAYS[kind]]
        for fault in (*faults, *(Fault(i, "EIO", reads=True) for i in range(1, one.reads + 1))):
            kind = "read" if fault.reads else one.kinds[fault.number - 1]
            yield Case(f"{one.scenario.name}: {fault} ({kind})", partial(_with_fault, one, fault))


def _with_fault(prepared: Prepared, fault: Fault, place: Path) -> str | None:
    shutil.copytree(prepared.start, place, dirs_exist_ok=True)
    outcome = children.run(_command(prepared, _shim(prepared, place, fault=fault)), place)
    if outcome.was_killed != (fault.way in {"kill", "torn"}):
        return f"{fault} was not reached, or killed nothing"
    return examine(prepared, place, outcome)


def signals(prepared: Sequence[Prepared]) -> Iterator[Case]:
    """Ctrl-C and an end on request, with every change of every scenario; ends without one, at random moments."""
    for one in prepared:
        for number, kind in enumerate(one.kinds, 1):
            for way in SIGNALS:
                fault = Fault(number, way)
                yield Case(f"{one.scenario.name}: {fault} ({kind})", partial(_with_fault, one, fault))
        for number in range(KILLS):
            for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                name = f"{one.scenario.name}: {sent.name} at random moment {number}"
                yield Case(name, partial(_with_signal, one, sent, number))


def _with_signal(prepared: Prepared, sent: signal.Signals, seed: int, place: Path) -> str | None:
    shutil.copytree(prepared.start, place, dirs_exist_ok=True)
    child = children.start(prepared.scenario.run(prepared.scenario.command, prepared.toys), place)
    child.ended(random.Random(seed).expovariate(10))
    os.kill(child.process, sent)
    return examine(prepared, place, child.wait())


def _shim(prepared: Prepared, place: Path, fault: Fault | None = None, room: int | None = None) -> Shim:
    return Shim(place, prepared.toys, fault, room, prepared.scenario.exchanges)


def _command(prepared: Prepared, shim: Shim, words: Words | None = None) -> Callable[[], int]:
    def call() -> int:
        shim.install()
        return prepared.scenario.run(words or prepared.scenario.command, prepared.toys)()

    return call


def power_cuts(prepared: Sequence[Prepared]) -> Iterator[Case]:
    """Between any two changes of every scenario, with different parts of what was not flushed."""
    for one in prepared:
        for count, call in enumerate(one.calls, 1):
            last = count == len(one.calls)
            for variant in VARIANTS if call.kind != "read" else ():
                if variant != "flushed" or last or call.kind == "fsync":
                    name = f"{one.scenario.name}: power cut after change {count}, {variant}"
                    yield Case(name, partial(_with_power_cut, one, count, variant))


def _with_power_cut(prepared: Prepared, count: int, variant: str, place: Path) -> str | None:
    root = prepared.start.with_name(PLACE)
    disk = after_cut(prepared.start, root, prepared.calls[:count], variant, seed=count)
    place.rmdir()
    saved(disk, place)
    os.chdir(place)
    return examine(prepared, place, None, finished=count == len(prepared.calls))


def full_disks(prepared: Sequence[Prepared], sizes: int = 30) -> Iterator[Case]:
    """Room for a part of what a command writes, from nothing to nearly all of it."""
    for one in prepared:
        least, most = taken(one.start), one.most_taken
        for number in range(sizes if most > least else 0):
            room = least + (most - least) * number // sizes
            yield Case(f"{one.scenario.name}: room for {room - least} bytes", partial(_with_room, one, room))


def _with_room(prepared: Prepared, room: int, place: Path) -> str | None:
    shutil.copytree(prepared.start, place, dirs_exist_ok=True)
    outcome = children.run(_command(prepared, _shim(prepared, place, room=room)), place)
    if outcome.code and taken(place) > taken(prepared.start) + LOCK:
        return f"{taken(place) - taken(prepared.start)} bytes stay on the full disk: {outcome.err.strip()}"
    if outcome.code and prepared.scenario.name.startswith("add"):
        enough = room + LOCK + 2 * (place / "store" / "manifest.json").stat().st_size  # nothing is replaced in place
        back = children.run(_command(prepared, _shim(prepared, place, room=enough), ("undo", "store")), place)
        return back.fault or (f"undo on the full disk: {back.err.strip()}" if back.code else None)
    return examine(prepared, place, outcome)
