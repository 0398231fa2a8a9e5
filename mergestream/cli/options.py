"""Options: dataclasses whose fields are the arguments of a command, and what is made of those that commands share.

A command's own ``Options`` inherits the groups that it needs. Each argument is declared once: its name and type by the
field, the rest as argparse knows it.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from mergestream.cli.printing import make_progress
from mergestream.errors import UsageError
from mergestream.escaping import shell_command
from mergestream.objects import USUAL_SIZE, cache_objects
from mergestream.sizes import counted, parse_size

if TYPE_CHECKING:
    from mergestream.api import Store
    from mergestream.engine import Engine
    from mergestream.experts.vocabulary import Vocab
    from mergestream.methods.base import Method
    from mergestream.progress import Progress

A_MODEL = "directory, file, or hub id org/name[@revision]"
"""What names a base or an expert."""


def argument(*flags: str, **settings: Any) -> Any:
    """A field that is given on the command line: by one of the flags, or by its place if there are none."""
    return field(metadata={"flags": flags, "settings": settings})


def switch(flag: str, help: str) -> Any:
    return argument(flag, action="store_true", help=help)


def repeated(flag: str, metavar: str, help: str) -> Any:
    return argument(flag, action="append", default=[], metavar=metavar, help=help)


def add_arguments(parser: ArgumentParser, options: type[Any]) -> None:
    """All fields of an options class; in the help those of the command itself come before inherited ones."""
    own = vars(options).get("__annotations__", {})
    for item in sorted(fields(options), key=lambda item: bool(item.metadata["flags"]) and item.name not in own):
        flags, settings = item.metadata["flags"], item.metadata["settings"]
        if flags:
            parser.add_argument(*flags, dest=item.name, **settings)
        else:
            parser.add_argument(item.name, **settings)


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


def engine_argument() -> Any:
    return argument(
        "--engine",
        default="local",
        metavar="NAME",
        help="who runs the work: local, ray (by RAY_ADDRESS, or on this machine), ray://HOST:PORT (local)",
    )


def make_engine(named: str, **options: Any) -> Engine:
    """The engine of that name, or by its address, NAME://…, with those of the options that are known."""
    from mergestream.engine import ENGINES

    name, has_address, _ = named.partition("://")
    known = {key: value for key, value in options.items() if value is not None}
    return ENGINES.choose(name)(**known, **({"address": named} if has_address else {}))


@dataclass(frozen=True)
class RunningOptions:
    """How many tensors are worked on at a time, and whether progress is shown."""

    workers: int | None = argument(
        "--workers", type=at_least(1), metavar="N", help="tensors worked on at a time (all cores)"
    )
    quiet: bool = switch("--quiet", "no progress bars and no notes")
    engine: str = engine_argument()
    cache: str | None = argument(
        "--cache", metavar="DIR", help="keep there what is read from object storage and hf://, for the next time"
    )
    cache_size: int = argument(
        "--cache-size", type=size, default=USUAL_SIZE, metavar="SIZE", help=f"of the cache at most ({USUAL_SIZE})"
    )

    def use_cache(self) -> None:
        cache_objects(self.cache, self.cache_size)

    def make_engine(self) -> Engine:
        return make_engine(self.engine, workers=self.workers, **self._limits)

    @property
    def _limits(self) -> dict[str, Any]:
        return {}

    def make_progress(self) -> Progress:
        return make_progress(self.quiet)


@dataclass(frozen=True)
class ComputingOptions(RunningOptions):
    """The same for commands that compute: also within which memory, and on what."""

    max_memory: int | None = argument(
        "--max-memory", type=size, metavar="SIZE", help="budget for tensors in RAM, such as 4GB"
    )
    device: str = argument("--device", default="cpu", help="where the arithmetic runs: cpu, cuda or cuda:N (cpu)")

    @property
    def _limits(self) -> dict[str, Any]:
        device = _checked_device(self.device) if self.engine == "local" else self.device
        return {"max_memory": self.max_memory, "device": device}


def _checked_device(device: str) -> str:
    if device == "cpu":
        return device
    import torch

    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index.isdigit() or not index):
        raise UsageError(f"--device {device} is not cpu, cuda or cuda:N")
    if int(index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {device} is not there: torch finds {counted(torch.cuda.device_count(), 'GPU')}")
    return device


@dataclass(frozen=True)
class StoreOptions:
    """Which store is looked at, or changed."""

    store: str = argument(metavar="STORE", help="the store: a directory, or s3://BUCKET/PATH")

    def open_store(self) -> Store:
        from mergestream.api import Store

        return Store(self.store, progress=make_progress())


@dataclass(frozen=True)
class WorkingStoreOptions(StoreOptions, RunningOptions):
    """Which store is worked with: by an engine, and re-pointed to ``--base`` where that is given."""

    base: str | None = argument(
        "--base", metavar="MODEL", help="where the base is now, if it has moved (its digest is checked)"
    )

    def open_store(self) -> Store:
        from mergestream.api import Store

        store = Store(self.store, engine=self.make_engine(), progress=self.make_progress())
        if self.base:
            store.relocate(self.base)
        return store


@dataclass(frozen=True)
class MethodOptions:
    """Which base is merged into, by which method, with which parameters, and which tensors are linear weights."""

    base: str = argument("--base", required=True, metavar="MODEL", help=A_MODEL)
    method: str | None = argument(
        "--method", metavar="M", help="ledger, opcm, average, …: see mergestream methods (ledger)"
    )
    alpha: float | None = argument(
        "--alpha", type=float, help="OPCM's projection threshold: --method opcm --set alpha=…"
    )
    parameters: list[str] = repeated("--set", "KEY=VALUE", "a parameter of the method")
    linear: list[str] = repeated("--linear", "GLOB", "tensors to treat as linear weights")
    not_linear: list[str] = repeated("--not-linear", "GLOB", "tensors not to treat as linear weights")

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
        usual = "ledger" if self.alpha is None else "opcm"
        return make_method(self.method or usual, parameters)


@dataclass(frozen=True)
class ExpertOptions:
    """Which tensors an expert may lack, and which of its own are left out."""

    partial: bool = switch("--partial", "tensors missing from an expert count as unchanged")
    ignore: list[str] = repeated("--ignore", "GLOB", "leave these tensors out")
    vocab: Vocab | None = argument(
        "--vocab",
        choices=("base", "union", "grow"),
        help="tokens that the base has not: left out, kept with the expert, or added to the merged model",
    )

    @property
    def reading(self) -> dict[str, Any]:
        """The arguments of ``Store.inspect``."""
        return {"partial": self.partial, "ignore": self.ignore, "vocab": self.vocab}


@dataclass(frozen=True)
class StoredExpertOptions(ExpertOptions):
    """The same where there is a store: also which tensors it keeps with each expert."""

    heads: list[str] = repeated("--heads", "GLOB", "tensors that the base has not: kept per expert, for export --task")

    @property
    def reading(self) -> dict[str, Any]:
        return {**super().reading, "heads": self.heads}


@dataclass(frozen=True)
class AddingOptions(ExpertOptions):
    """The same for experts that are merged: also whether one may come twice, or from elsewhere."""

    allow_duplicate: bool = switch("--allow-duplicate", "also one that was absorbed already, or the base itself")
    allow_other_base: bool = switch("--allow-other-base", "also one that was not made from the base")


@dataclass(frozen=True)
class GatedOptions(AddingOptions, StoredExpertOptions):
    """The same for experts that a store absorbs: also what is asked of them before they count."""

    gate: list[str] = repeated(
        "--gate",
        "CONDITION",
        "refuse an expert that fails it; on kept, max_cosine, relative_norm, norm, lambda, distance or score; "
        "of a ledger on damage and held instead of lambda and distance",
    )
    evaluate: str | None = argument(
        "--evaluate",
        metavar="CMD",
        help="run this on the merged model before it counts, with {model} for its directory; "
        "score is the last number it prints, or the mean of what it writes to {scores} (lm-eval's results)",
    )

    log: list[str] = repeated(
        "--log",
        "TRACKER[:TARGET]",
        "send the numbers of each step to wandb, mlflow, tensorboard or jsonl, "
        "as in wandb:PROJECT, mlflow:EXPERIMENT, tensorboard:DIR, jsonl:FILE",
    )

    @property
    def adding(self) -> dict[str, Any]:
        """The arguments of ``Store.add`` that decide what becomes of an expert."""
        return {
            **self.reading,
            "allow_duplicate": self.allow_duplicate,
            "allow_other_base": self.allow_other_base,
            "gates": self.gate,
            "evaluate": self.evaluate,
        }


@dataclass(frozen=True)
class OutputOptions:
    """How a model is written; where to has a place of its own on every command line."""

    dtype: str | None = argument("--dtype", metavar="TYPE", help="bf16, fp16, fp32 or fp64 (the base's own)")
    max_shard_size: int = argument(
        "--max-shard-size", type=size, default="5GB", metavar="SIZE", help="size of a file (5GB)"
    )
    overwrite: bool = switch("--overwrite", "replace an earlier export")


def command_line() -> str:
    """The command as it was given, for the model card."""
    return shell_command(["mergestream", *sys.argv[1:]])
