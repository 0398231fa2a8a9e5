"""What the commands share: opening a store, running options, and printing."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mergestream.api import Store
from mergestream.engine import LocalEngine
from mergestream.errors import UsageError
from mergestream.progress import Progress, TerminalProgress

if TYPE_CHECKING:
    from mergestream.methods.base import Method


def make_engine(arguments: Namespace) -> LocalEngine:
    options: dict[str, Any] = {}
    if arguments.workers:
        options["workers"] = arguments.workers
    if getattr(arguments, "max_memory", None) is not None:
        options["max_memory"] = arguments.max_memory
    if getattr(arguments, "device", "cpu") != "cpu":
        options["device"] = _checked_device(arguments.device)
    return LocalEngine(**options)


def _checked_device(device: str) -> str:
    import torch

    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index.isdigit() or not index):
        raise UsageError(f"--device {device} is not cpu, cuda or cuda:N")
    if int(index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {device} is not there: torch finds {torch.cuda.device_count()} GPU(s)")
    return device


def make_progress(arguments: Namespace) -> Progress:
    return Progress() if getattr(arguments, "quiet", False) else TerminalProgress()


def open_store(arguments: Namespace) -> Store:
    """The store, re-pointed to --base where that is given."""
    if not hasattr(arguments, "workers"):
        return Store(arguments.store)
    store = Store(arguments.store, engine=make_engine(arguments), progress=make_progress(arguments))
    if getattr(arguments, "base", None):
        store.relocate(arguments.base)
    return store


def make_method_from(arguments: Namespace) -> Method:
    from mergestream.methods import make_method

    parameters = {}
    for setting in arguments.parameters:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting} is not of the form KEY=VALUE")
        parameters[key] = value
    if arguments.alpha is not None:
        parameters["alpha"] = arguments.alpha
    return make_method(arguments.method, parameters)


def print_json(data: Any) -> None:
    print(json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(data: Any) -> Any:
    """JSON has no infinity: the λ of a scale of 0 is null."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, left: int = 1) -> None:
    """Columns as wide as their content; the first ``left`` are text, the others numbers."""
    table = [[str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(headings))]
    for row in table:
        cells = (
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


def command_line() -> str:
    """The command as it was given, for the model card."""
    import shlex

    return shlex.join(["mergestream", *sys.argv[1:]])
