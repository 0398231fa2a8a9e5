"""Options that several commands share: what they are called, what they are parsed into, and what is made of them.

A command's own ``Options`` inherits from the groups whose arguments it adds. Defaults are given once, to argparse.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergestream.errors import UsageError
from mergestream.sizes import parse_size

if TYPE_CHECKING:
    from mergestream.api import Store
    from mergestream.engine import Engine
    from mergestream.methods.base import Method
    from mergestream.progress import Progress

A_MODEL = "directory, file, or hub id org/name[@revision]"
"""What names a base or an expert."""


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that counts something."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < least:
            raise ArgumentTypeError(f"{number} is too small; the least is {least}")
        return number

    return parse


def size(text: str) -> int:
    """Bytes, as in 4GB."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from None


# --- how the work runs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunningOptions:
    """How many tensors are worked on at a time, and whether progress is shown."""

    workers: int | None
    quiet: bool

    def make_engine(self, usual_workers: int | None = None) -> Engine:
        """``usual_workers`` is how many there are if the user does not say; else it is the engine's own choice."""
        from mergestream.engine import LocalEngine

        return LocalEngine(**_given(workers=self.workers or usual_workers))

    def make_progress(self) -> Progress:
        from mergestream.progress import Progress, TerminalProgress

        return Progress() if self.quiet else TerminalProgress()


@dataclass(frozen=True)
class ComputingOptions(RunningOptions):
    """The same for commands that compute: also within which memory, and on what."""

    max_memory: int | None
    device: str
    engine: str

    def make_engine(self, usual_workers: int | None = None) -> Engine:
        from mergestream.engine import ENGINES

        options = _given(
            workers=self.workers or usual_workers, max_memory=self.max_memory, device=_checked_device(self.device)
        )
        return ENGINES.choose(self.engine)(**options)


def _given(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _checked_device(device: str) -> str:
    if device == "cpu":
        return device
    import torch

    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index.isdigit() or not index):
        raise UsageError(f"--device {device} is not cpu, cuda or cuda:N")
    if int(index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {device} is not there: torch finds {torch.cuda.device_count()} GPU(s)")
    return device


def add_running_options(parser: ArgumentParser) -> None:
    _add_workers(parser, "all cores")
    _add_quiet(parser)


def add_computing_options(parser: ArgumentParser, workers: str = "all cores") -> None:
    _add_workers(parser, workers)
    parser.add_argument("--max-memory", type=size, metavar="SIZE", help="budget for tensors in RAM, such as 4GB")
    parser.add_argument("--device", default="cpu", help="where the arithmetic runs: cpu, cuda or cuda:N (cpu)")
    parser.add_argument("--engine", default="local", metavar="NAME", help="who runs the work (local)")
    _add_quiet(parser)


def _add_workers(parser: ArgumentParser, default: str) -> None:
    parser.add_argument("--workers", type=at_least(1), metavar="N", help=f"tensors worked on at a time ({default})")


def _add_quiet(parser: ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress bars and no notes")


# --- the store and its base --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreOptions:
    """Which store is looked at."""

    store: str

    def open_store(self) -> Store:
        from mergestream.api import Store

        return Store(self.store)


@dataclass(frozen=True)
class WorkingStoreOptions(StoreOptions, RunningOptions):
    """Which store is worked with: by an engine, and re-pointed to ``--base`` where that is given."""

    base: str | None

    def open_store(self) -> Store:
        from mergestream.api import Store

        store = Store(self.store, engine=self.make_engine(), progress=self.make_progress())
        if self.base:
            store.relocate(self.base)
        return store


def add_store(parser: ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE")


def add_moved_base(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--base", metavar="MODEL", help="where the base is now, if it has moved (its digest is checked)"
    )


def add_required_base(parser: ArgumentParser) -> None:
    parser.add_argument("--base", required=True, metavar="MODEL", help=A_MODEL)


# --- how models are merged ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class MethodOptions:
    """Which method merges, with which parameters."""

    method: str
    alpha: float | None
    parameters: list[str]

    def make_method(self) -> Method:
        from mergestream.methods import make_method

        parameters: dict[str, Any] = {}
        for setting in self.parameters:
            key, equals, value = setting.partition("=")
            if not equals:
                raise UsageError(f"--set {setting} is not of the form KEY=VALUE")
            parameters[key] = value
        if self.alpha is not None:
            parameters["alpha"] = self.alpha
        return make_method(self.method, parameters)


def add_method_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--method", default="opcm", metavar="M", help="opcm, average, …: see mergestream methods (opcm)"
    )
    parser.add_argument("--alpha", type=float, help="OPCM's projection threshold, the same as --set alpha=…")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="parameters", help="a parameter of the method"
    )


@dataclass(frozen=True)
class RoleOptions:
    """Which tensors are linear weights, where the rules of mergestream would say otherwise."""

    linear: list[str]
    not_linear: list[str]


def add_role_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--linear", action="append", default=[], metavar="GLOB", help="tensors to treat as linear weights")
    add("--not-linear", action="append", default=[], metavar="GLOB", help="tensors not to treat as linear weights")


@dataclass(frozen=True)
class ExpertOptions:
    """Which tensors an expert may lack, and which of its own are left out."""

    partial: bool
    ignore: list[str]


def add_expert_options(parser: ArgumentParser) -> None:
    parser.add_argument("--partial", action="store_true", help="tensors missing from an expert count as unchanged")
    parser.add_argument("--ignore", action="append", default=[], metavar="GLOB", help="leave these tensors out")


@dataclass(frozen=True)
class DuplicateOptions:
    """Whether an expert may come twice."""

    allow_duplicate: bool


def add_duplicate_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--allow-duplicate", action="store_true", help="also one that was absorbed already, or the base itself"
    )


# --- what is written ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputOptions:
    """How a model is written."""

    out: str
    dtype: str | None
    max_shard_size: int
    overwrite: bool


def add_output_options(parser: ArgumentParser) -> None:
    """All but ``out``, which is a place of its own on every command line."""
    parser.add_argument("--dtype", help="float32, float16, bfloat16 or float64 (the base's own)")
    parser.add_argument("--max-shard-size", type=size, default="5GB", metavar="SIZE", help="size of a file (5GB)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing directory")


def command_line() -> str:
    """The command as it was given, for the model card."""
    import shlex

    return shlex.join(["mergestream", *sys.argv[1:]])
