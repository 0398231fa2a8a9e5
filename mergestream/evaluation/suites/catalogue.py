"""Suites by name or by file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mergestream.errors import UsageError, did_you_mean
from mergestream.evaluation.checkout import OFFLINE_SUITES, find
from mergestream.evaluation.suites.base import Choices, Suite
from mergestream.evaluation.suites.files import SUFFIXES, load_suite
from mergestream.registry import Registry

SUITES: Registry[Suite | Callable[[], Suite]] = Registry(
    "suite", "mergestream.suites", {"clip": "mergestream.evaluation.suites.clip:ClipSuite"}
)


def open_suite(
    name: str,
    *,
    tasks: int | None = None,
    test_limit: int | None = None,
    model: str | None = None,
    evaluate: str | None = None,
) -> Suite:
    """The suite of a name (``clip``, in a checkout the offline suites', or another package's), or of a file."""
    choices = Choices(tasks, test_limit, model, evaluate)
    file = _file(name)
    return choices.of(_registered(name)) if file is None else load_suite(file, choices)


def _file(name: str) -> Path | None:
    if Path(name).suffix in SUFFIXES:
        return Path(name)
    if name not in OFFLINE_SUITES:
        return None
    script = f"{name.replace('-', '_')}.py"
    file = find(script)
    if file is None:
        raise UsageError(
            f"the suite {name} is not in the installed package: it is benchmarks/suites/{script} in a checkout "
            "of mergestream's repository, and mergestream bench takes that path"
        )
    return file


def _registered(name: str) -> Suite:
    if name not in SUITES:
        known = (*OFFLINE_SUITES, *SUITES)
        raise UsageError(
            f"there is no suite {name}{did_you_mean(name, known)} "
            f"(there are: {', '.join(known)}, and files ending in {', '.join(SUFFIXES)})"
        )
    found = SUITES[name]
    suite = found if isinstance(found, Suite) else found()
    if not isinstance(suite, Suite):
        raise UsageError(f"{name} of {SUITES.origin(name)} is not a suite but {type(suite).__name__}")
    return suite
