"""Mutation testing: change one operator or constant at a time and see whether a test fails.

    python -m benchmarks.mutation --map               # once: which test runs which line (several minutes)
    python -m benchmarks.mutation --sample 300        # mutate, run the tests that reach the line, report the survivors

The sample is drawn with a fixed seed from the modules that compute a merge and commit it (`TARGETS`). A mutant is
killed if one of the tests that reach its line fails, or if they run ten times longer than before. Each mutant runs in
a copy of the checkout; the checkout itself is never changed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
CACHE = CHECKOUT / ".cache" / "mutation"
TARGETS = ("algebra", "methods", "ledger", "merging", "store")
"""Folders of the package that are mutated"""
TESTS = ("algebra", "methods", "ledger", "merging", "store", "export", "experts", "inputs", "report", "cli")
"""Folders of the tests that may kill a mutant"""
REVIEWED = CHECKOUT / "benchmarks" / "mutation_equivalent.json"
"""Survivors that a person has found equivalent: they change no result, only speed, memory or the order of work"""
SLOWEST = 60.0
"""Seconds of tests per mutant; the fastest tests that reach the line come first"""
COPIED = ("mergestream", "tests", "benchmarks", "examples", "docs", "pyproject.toml", "README.md", "mkdocs.yml")

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one node of a file."""

    path: str
    line: int
    number: int
    """Which of the file's candidates it is"""
    change: str
    source: str
    """The line as it is"""

    @property
    def key(self) -> str:
        """Identifies the mutant as long as its line stays the same."""
        return f"{self.path}: {self.source} [{self.change}]"


def candidates(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Every node that can be mutated, with a description of the change, in a fixed order."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__repr__":
            skipped |= set(ast.walk(node))
        elif isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):  # messages
            skipped |= set(ast.walk(node)) - {node}
        for found in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            skipped |= set(ast.walk(found)) if found else set()
        for decorator in getattr(node, "decorator_list", ()):
            skipped |= set(ast.walk(decorator))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARE:
            yield node, f"{type(node.ops[0]).__name__} → {_COMPARE[type(node.ops[0])].__name__}"
        elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY and not _is_text(node):
            yield node, f"{type(node.op).__name__} → {_BINARY[type(node.op)].__name__}"
        elif isinstance(node, ast.BoolOp):
            yield node, "and ↔ or"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield node, f"drop {'not' if isinstance(node.op, ast.Not) else '-'}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            yield node, f"{node.value} → {_other(node.value)}"
        elif isinstance(node, ast.If | ast.IfExp) and not _is_type_checking(node.test):
            yield node, "negate condition"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "drop call"
        elif isinstance(node, ast.Raise) and node.exc:
            yield node, "drop raise"


def _is_text(node: ast.BinOp) -> bool:
    """Whether strings or lists are joined; other operators would only raise."""
    joined = ast.JoinedStr | ast.List | ast.Tuple | ast.Dict
    return any(
        isinstance(part, joined) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in (node.left, node.right)
    )


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _other(value: bool | int | float) -> bool | int | float:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 2 + 1


def mutate(source: str, number: int) -> str:
    """The source of a file with one candidate changed."""
    tree = copy.deepcopy(ast.parse(source))
    node = next(node for place, (node, _) in enumerate(candidates(tree)) if place == number)
    match node:
        case ast.Compare():
            node.ops[0] = _COMPARE[type(node.ops[0])]()
        case ast.BinOp():
            node.op = _BINARY[type(node.op)]()
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.Constant(value=int(value) | float(value)):
            node.value = _other(value)
        case ast.If() | ast.IfExp():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.UnaryOp() | ast.Expr() | ast.Raise():
            _replace(tree, node, node.operand if isinstance(node, ast.UnaryOp) else ast.Pass())
    return ast.unparse(ast.fix_missing_locations(tree))


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list) and old in value:
                value[value.index(old)] = new


def all_mutants(folders: Sequence[str] = TARGETS) -> list[Mutant]:
    """All candidates of the mutated folders, in a fixed order."""
    found = []
    for folder in folders:
        for path in sorted((CHECKOUT / "mergestream" / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            lines, name = text.splitlines(), str(path.relative_to(CHECKOUT))
            for number, (node, change) in enumerate(candidates(ast.parse(text))):
                line = getattr(node, "lineno", 1)
                found.append(Mutant(name, line, number, change, lines[line - 1].strip()))
    return found


def write_map() -> None:
    """Run the tests once with coverage, and keep which tests reach which line, and how long each takes."""
    CACHE.mkdir(parents=True, exist_ok=True)
    data, durations = CACHE / "coverage", CACHE / "durations.json"
    environment = {**os.environ, "COVERAGE_FILE": str(data), "OMP_NUM_THREADS": "1"}
    folders = [f"tests/{name}" for name in TESTS]
    options = ["--cov=mergestream", "--cov-context=test", "--cov-report=", f"--junit-xml={CACHE / 'tests.xml'}"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(os.cpu_count() or 1), *options, *folders]
    subprocess.run(command, cwd=CHECKOUT, env=environment, check=True)
    from xml.etree import ElementTree

    seconds = {}
    for case in ElementTree.parse(CACHE / "tests.xml").iter("testcase"):
        seconds[_test_id(case.get("classname", ""), case.get("name", ""))] = float(case.get("time", 0))
    durations.write_text(json.dumps(seconds), encoding="utf-8")


def _test_id(module: str, name: str) -> str:
    return f"{module.replace('.', '/')}.py::{name}"


class TestMap:
    """Which tests reach a line, the fastest first."""

    def __init__(self) -> None:
        from coverage import CoverageData

        if not (CACHE / "durations.json").exists():
            sys.exit("run this first: python -m benchmarks.mutation --map")
        self.data = CoverageData(str(CACHE / "coverage"))
        self.data.read()
        self.seconds: dict[str, float] = json.loads((CACHE / "durations.json").read_text(encoding="utf-8"))

    def tests(self, mutant: Mutant) -> list[str]:
        by_line = self.data.contexts_by_lineno(str(CHECKOUT / mutant.path))
        contexts = set(by_line.get(mutant.line, ()))
        if contexts == {""}:  # executed when the module is imported: any test that uses the file may notice
            contexts = set().union(*by_line.values())
        found = {context.partition("|")[0] for context in contexts if context}
        chosen: list[str] = []
        total = 0.0
        for test in sorted(found & self.seconds.keys(), key=lambda test: (self.seconds[test], test)):
            total += self.seconds[test]
            if chosen and total > SLOWEST:
                break
            chosen.append(test)
        return chosen


def judge(copied: Path, mutant: Mutant, tests: Sequence[str], limit: float) -> str:
    """Run the tests on a mutant in a forked process: ``killed``, ``timeout`` or ``survived``."""
    path = copied / mutant.path
    original, status = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(mutate(original, mutant.number), encoding="utf-8")
    child = os.fork()
    if not child:
        _run_tests(copied, tests)
    try:
        end = time.monotonic() + limit
        while time.monotonic() < end:
            done, code = os.waitpid(child, os.WNOHANG)
            if done:
                return "survived" if code == 0 else "killed"
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "timeout"
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _run_tests(copied: Path, tests: Sequence[str]) -> None:
    """In the child: run pytest on the copy, and exit with its code."""
    os.setpgid(0, 0)
    os.chdir(copied)
    sys.path[:] = [str(copied), *(entry for entry in sys.path if entry not in ("", str(CHECKOUT)))]
    os.environ["PYTHONPATH"] = str(copied)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    import pytest

    os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests])))


def _work(mutants: Sequence[Mutant], results: multiprocessing.SimpleQueue[tuple[Mutant, str]]) -> None:
    import hypothesis  # noqa: F401  (imported once here: every forked child starts with them)
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    reached = TestMap()
    with tempfile.TemporaryDirectory(prefix="mutation-") as temporary:
        copied = Path(temporary)
        for name in COPIED:
            source = CHECKOUT / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, copied / name)
        for mutant in mutants:
            tests = reached.tests(mutant)
            usual = sum(reached.seconds[test] for test in tests)
            results.put((mutant, judge(copied, mutant, tests, 30 + 10 * usual) if tests else "not reached"))


def run(sample: int, seed: int, workers: int, only: str) -> dict[str, list[Mutant]]:
    """Judge a sample of all mutants on several processes; returns the mutants by outcome."""
    everything = [mutant for mutant in all_mutants() if only in mutant.path]
    chosen = random.Random(seed).sample(everything, min(sample, len(everything)))
    reviewed = json.loads(REVIEWED.read_text(encoding="utf-8")) if REVIEWED.exists() else {}
    outcomes: dict[str, list[Mutant]] = {}
    results: multiprocessing.SimpleQueue[tuple[Mutant, str]] = multiprocessing.SimpleQueue()
    shares = [chosen[number::workers] for number in range(workers)]
    processes = [multiprocessing.Process(target=_work, args=(share, results)) for share in shares]
    for process in processes:
        process.start()
    for done in range(1, len(chosen) + 1):
        mutant, outcome = results.get()
        if outcome in ("survived", "not reached") and mutant.key in reviewed:
            outcome = "equivalent"
        outcomes.setdefault(outcome, []).append(mutant)
        print(f"{done:4d} of {len(chosen)}: {outcome:11s} {mutant.path}:{mutant.line} {mutant.change}", flush=True)
    for process in processes:
        process.join()
    print(f"\n{len(chosen)} of {len(everything)} mutants, seed {seed}")
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--map", action="store_true", help="run the tests once and keep which test reaches which line")
    parser.add_argument("--sample", type=int, default=300, help="how many mutants to try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="only files whose path contains this")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    options = parser.parse_args()
    if options.map:
        return write_map()
    outcomes = run(options.sample, options.seed, options.workers, options.only)
    counts = {outcome: len(mutants) for outcome, mutants in outcomes.items()}
    judged = sum(counts.values()) - counts.get("equivalent", 0)
    killed = counts.get("killed", 0) + counts.get("timeout", 0)
    print(f"killed {killed} of {judged} ({killed / max(judged, 1):.1%}); {counts}")
    for outcome in ("survived", "not reached"):
        for mutant in outcomes.get(outcome, ()):
            print(f"{outcome}: {mutant.path}:{mutant.line} [{mutant.change}]  {mutant.source}")
    if options.json:
        found = {outcome: [asdict(mutant) for mutant in mutants] for outcome, mutants in outcomes.items()}
        options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
