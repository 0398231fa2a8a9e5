"""The whole attack: every family of cases, on all cores, and what came of it.

    python -m tests.faults.torture              all of it, about an hour on two cores
    python -m tests.faults.torture --quick      the same few of each, as in CI

Cases are tried in a random order, the same every time: as many as there is time for (``--minutes``) are a sample
of all. A run that was cut short goes on where it was, for the same commit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from mergestream.digest import text_digest
from tests.faults import children
from tests.faults.cases import Case
from tests.faults.disturbed import PLACE, warm
from tests.faults.families import FAMILIES, Family

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "reliability" / "results.json"
PAGE = ROOT / "docs" / "explanation" / "reliability.md"
BEGIN, END = "<!-- written by make torture -->", "<!-- end -->"


HOUR = 3600.0


def main() -> int:
    options = _options()
    os.nice(5)
    commit = _commit()
    log = options.log or ROOT / "build" / f"torture-{commit}{'-quick' if options.quick else ''}.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    if options.quick:
        log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="torture-", dir=_memory()) as directory:
        families = [family for family in FAMILIES if not options.only or family.name in options.only]
        total = run(Path(directory), families, log, options)
    results = _read(log)
    _print(results)
    if not options.quick and not options.only:
        _publish(results, total, commit)
    return 1 if any(result["wrong"] for result in results) else 0


def run(work: Path, families: Sequence[Family], log: Path, options: argparse.Namespace) -> int:
    """Run what is not in the log yet, as far as there is time; every worker has every n-th case. Returns how many cases
    there are in all."""
    warm(work / "warm")
    done = {(result["family"], result["case"]) for result in _read(log)}
    cases: list[tuple[Family, Case]] = []
    for family in families:
        (work / family.name).mkdir()
        found = list(family.cases(work / family.name))
        if options.quick:
            found = _sample(found, family.quick)
        cases += [(family, case) for case in found if (family.name, case.name) not in done]
    cases.sort(
        key=lambda case: (case[0].limit < HOUR, text_digest(f"{case[0].name} {case[1].name}"))
    )  # long ones first
    expected, started = len(done) + len(cases), time.monotonic()
    deadline = started + 60 * options.minutes
    workers = [
        children.start(partial(_work, work / f"worker-{number}", cases[number :: options.workers], log, deadline))
        for number in range(options.workers)
    ]
    while not all(worker.ended(0) for worker in workers):
        if not options.quick:
            print(f"\r{len(_read(log))} of {expected}, {time.monotonic() - started:.0f} s", end="", flush=True)
        workers[0].ended(5)
        time.sleep(0.05)
    print()
    for worker in workers:
        outcome = worker.wait()
        if outcome.code:
            sys.exit(outcome.err)
    return expected


def _sample(cases: Sequence[Case], count: int) -> list[Case]:
    """The same few every time; all kinds of them, as they are in order and the sample is spread over them."""
    if len(cases) <= count or not count:
        return list(cases[:count])
    dice = random.Random(count)
    edges = [len(cases) * number // count for number in range(count + 1)]
    return [cases[dice.randrange(low, high)] for low, high in pairwise(edges)]


def _work(home: Path, cases: Sequence[tuple[Family, Case]], log: Path, deadline: float) -> None:
    place = home / PLACE
    for family, case in cases:
        if time.monotonic() > deadline:
            break
        shutil.rmtree(home, ignore_errors=True)
        place.mkdir(parents=True)
        started = time.monotonic()
        outcome = children.run(partial(case.run, place), place, family.limit)
        wrong = outcome.result if outcome.code == 0 else outcome.err.strip()[-2000:] or f"it ended with {outcome.code}"
        line = {"family": family.name, "case": case.name, "wrong": wrong, "seconds": time.monotonic() - started}
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    shutil.rmtree(home, ignore_errors=True)


# --- results ------------------------------------------------------------------------------------------------


def _read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []


def counts(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tried, clean and damaged, by family."""
    tried = Counter(result["family"] for result in results)
    damaged = Counter(result["family"] for result in results if result["wrong"])
    return [
        {"family": family.name, "what": family.what, "tried": tried[family.name], "damaged": damaged[family.name]}
        for family in FAMILIES
        if tried[family.name]
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| family | tried | clean | damaged |", "|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row['what']} | {row['tried']:,} | {row['tried'] - row['damaged']:,} | {row['damaged']:,} |")
    tried, damaged = (sum(row[key] for row in rows) for key in ("tried", "damaged"))
    return "\n".join([*lines, f"| **all** | **{tried:,}** | **{tried - damaged:,}** | **{damaged:,}** |"])


def _print(results: Sequence[dict[str, Any]]) -> None:
    for result in results:
        if result["wrong"]:
            print(f"{result['family']}: {result['case']}: {result['wrong']}")
    print(table(counts(results)))
    print(f"{sum(result['seconds'] for result in results):.0f} s of work")


def _publish(results: Sequence[dict[str, Any]], total: int, commit: str) -> None:
    """The counts, with the commit, into the results and the page that shows them."""
    rows = counts(results)
    seconds = round(sum(result["seconds"] for result in results))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    found = {"commit": commit, "cases": total, "tried": len(results), "seconds": seconds, "families": rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    tried = "all" if len(results) == total else f"a random {len(results):,} of"
    figure = "![Seconds per add and size of the store over 500 adds](../results/reliability/soak.png)"
    text = f"Commit `{commit}`: {tried} {total:,} cases.\n\n{table(rows)}\n\n{figure}"
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", "utf-8")
    subprocess.run([sys.executable, "-m", "tests.faults.soak"], cwd=ROOT, check=True)


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "mergestream", "tests")
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + ("-changed" if changed else "")


def _memory() -> Path | None:
    """A disk in memory, where there is one: flushes are simulated."""
    place = Path("/dev/shm")
    return place if place.is_dir() and shutil.disk_usage(place).free > 4 << 30 else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases of each family")
    parser.add_argument("--only", action="append", choices=[family.name for family in FAMILIES], help="this family")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after so many")
    parser.add_argument("--log", type=Path, help="where each case is noted as it is done")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
