"""All families of cases, in the order in which they are run and shown."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from tests.faults import concurrency, disturbed, flips, forged, inputs, numerics, soak, surfaces
from tests.faults.cases import Case
from tests.faults.children import LIMIT
from tests.faults.concurrency import mapped
from tests.faults.scenarios import SCENARIOS, Prepared, make_toys

INPUTS = 10_000


class Family(NamedTuple):
    name: str
    what: str
    """In the table"""
    cases: Callable[[Path], Iterable[Case]]
    """Makes the cases, the same in the same order every time; what they share is put into the directory"""
    quick: int = 24
    """How many of them are in the quick part"""
    limit: float = LIMIT
    """Seconds after which a case is said to hang"""


@cache
def _prepared(work: Path) -> Sequence[Prepared]:
    """All scenarios, run once for all families."""
    toys = make_toys(work / "toys")
    return [disturbed.prepare(scenario, toys, work / name) for name, scenario in SCENARIOS.items()]


def _over_scenarios(cases: Callable[[Sequence[Prepared]], Iterator[Case]]) -> Callable[[Path], Iterator[Case]]:
    return lambda work: cases(_prepared(work.parent / "scenarios"))


def _fuzzed(work: Path) -> Iterator[Case]:
    for kind in ("config", "adapter"):  # have imported what reading them takes
        (work / kind).mkdir()
        inputs.fault(inputs.case(0, kind), work / kind)
    made = (*inputs.known(), *map(inputs.case, range(INPUTS)))
    return (Case(f"{number}: {case.label}", partial(_swallowed, case)) for number, case in enumerate(made))


def _surfaces(work: Path) -> Iterator[Case]:
    for kind in surfaces.SURFACES:  # have imported what reading them takes
        if kind not in ("bucket", "hub"):  # these start threads, which no child would have
            (work / kind).mkdir()
            inputs.fault(surfaces.case(0, kind), work / kind)
    return (Case(case.label, partial(_swallowed, case)) for case in surfaces.cases(work))


def _swallowed(case: inputs.Case, place: Path) -> str | None:
    """Within two gigabytes of memory."""
    most = mapped() + (2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return inputs.fault(case, place)


FAMILIES = (
    Family("calls", "a call fails, or is the last", _over_scenarios(disturbed.failing_calls), quick=60),
    Family("power", "power cuts", _over_scenarios(disturbed.power_cuts), quick=40),
    Family("signals", "signals, with any change and at any moment", _over_scenarios(disturbed.signals), quick=30),
    Family("full", "full disks", _over_scenarios(disturbed.full_disks), quick=20),
    Family("flips", "a flipped bit in a file of a store", flips.cases, quick=0),
    Family("forged", "forged manifests and records", forged.cases, quick=0),
    Family("inputs", "fuzzed checkpoints, configs, adapters", _fuzzed, quick=0),
    Family("surfaces", "recipes, inputs, tokenizers, LoRAs, routed exports, buckets, hub", _surfaces, quick=0),
    Family("numbers", "numbers and shapes at the edge", numerics.cases, quick=40, limit=600),
    Family("others", "races, read-only stores, limits of the system", concurrency.cases, quick=40),
    Family("soak", "500 adds with undos, removals and kills", soak.cases, quick=0, limit=3600),
)
