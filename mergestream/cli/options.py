"""Options that commands share, as dataclasses. A command inherits the groups that it needs.

Each field is one argument: its name and type come from the field, everything else goes to argparse.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from mergestream.cli.printing import make_progress
from mergestream.errors import UsageError
from mergestream.escaping import shell_command
from mergestream.sizes import counted, parse_size

if TYPE_CHECKING:
    from mergestream.engine import Engine
    from mergestream.experts.vocabulary import Vocab
    from mergestream.inputs.reading import Inputs
    from mergestream.methods.base import Method
    from mergestream.store.store import Store

MODEL = "directory, file, s3://… or hub id org/name[@revision]"
"""What a user may give as a base or an expert"""


def argument(usage: str, help: str, **settings: Any) -> Any:
    """A field that is an option, such as ``-o --out FILE``, or a positional argument, such as ``STORE``.

    An option without a metavar is a switch if the field is a ``bool``; an option for a list may be given several times.
    """
    words = usage.split()
    flags = [word for word in words if word.startswith("-")]
    if metavar := words[len(flags) :]:
        settings["metavar"] = metavar[0]
    return field(metadata={"flags": flags, "settings": {**settings, "help": help}})


def add_arguments(parser: ArgumentParser, options: type[Any]) -> None:
    """Add all fields of a command to a parser; the help shows a command's own options before shared ones."""
    own = vars(options).get("__annotations__", {})
    for item in sorted(fields(options), key=lambda item: bool(item.metadata["flags"]) and item.name not in own):
        flags, settings = item.metadata["flags"], item.metadata["settings"]
        if not flags:
            parser.add_argument(item.name, **settings)
        elif item.type == "bool":
            parser.add_argument(*flags, dest=item.name, action="store_true", **settings)
        elif str(item.type).startswith("list["):
            parser.add_argument(*flags, dest=item.name, action="append", default=[], **settings)
        else:
            parser.add_argument(*flags, dest=item.name, **settings)


def arguments_of(function: Callable[..., Any], options: Any, **others: Any) -> dict[str, Any]:
    """The arguments of a call: those options, and ``others`` in place of options, that the function has."""
    from inspect import signature

    known = signature(function).parameters
    return {name: value for name, value in {**vars(options), **others}.items() if name in known}


def at_least(least: int) -> Callable[[str], int]:
    """An argument type: a whole number with a lower bound."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return number

    return parse


def pair(text: str) -> tuple[str, str]:
    """An argument type: ``NAME=VALUE``."""
    name, _, value = text.partition("=")
    if not (name and value):
        raise ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def weight(text: str) -> tuple[str, float]:
    """An argument type: ``NAME=0.5``."""
    name, _, number = text.rpartition("=")
    with suppress(ValueError):
        if name:
            return name, float(number)
    raise ArgumentTypeError(f"{text!r} is not of the form NAME=NUMBER")


def names(text: str) -> tuple[str, ...]:
    """An argument type: ``A,B``."""
    return tuple(filter(None, text.split(",")))


def make_engine(named: str, **options: Any) -> Engine:
    """Create an engine by name or by address (``NAME://…``), with the options that are not None."""
    from mergestream.engine import ENGINES

    name, has_address, _ = named.partition("://")
    given = {key: value for key, value in options.items() if value is not None}
    return ENGINES.choose(name)(**given, **({"address": named} if has_address else {}))


@dataclass(frozen=True)
class RunningOptions:
    """How a command runs: engine, workers, memory, device, progress."""

    workers: int | None = argument("--workers N", "tensors in parallel (all cores)", type=at_least(1))
    max_memory: int | None = argument("--max-memory SIZE", "memory budget for tensors, such as 4GB", type=parse_size)
    device: str = argument("--device", "where arithmetic runs: cpu (the default), cuda or cuda:N", default="cpu")
    engine: str = argument(
        "--engine NAME",
        "where work runs: local (the default), ray (RAY_ADDRESS, else this machine) or ray://HOST:PORT",
        default="local",
    )
    quiet: bool = argument("--quiet", "show no progress bars and no notes")

    def make_engine(self) -> Engine:
        """Create the engine that the options name."""
        if self.engine == "local" and self.device != "cpu":
            _check_gpu(self.device)
        return make_engine(self.engine, workers=self.workers, max_memory=self.max_memory, device=self.device)

    @property
    def running(self) -> dict[str, Any]:
        """The engine and the progress display, as arguments of functions that compute."""
        return {"engine": self.make_engine(), "progress": make_progress(self.quiet)}


def _check_gpu(device: str) -> None:
    import torch

    found = torch.cuda.device_count()
    if device not in ("cuda", *(f"cuda:{index}" for index in range(found))):
        raise UsageError(f"--device {device} is not cpu, cuda or cuda:N; torch finds {counted(found, 'GPU')}")


@dataclass(frozen=True)
class StoreOptions:
    """The store to read, or to change without computing."""

    store: str = argument("STORE", "the store: a directory or s3://BUCKET/PATH")

    def open_store(self) -> Store:
        """Open the store."""
        from mergestream.store.store import Store

        return Store(self.store, progress=make_progress())


@dataclass(frozen=True)
class WorkingStoreOptions(StoreOptions, RunningOptions):
    """The store to work on, and where its base is now."""

    base: str | None = argument("--base MODEL", "new location of the base (its digest is checked)")

    def open_store(self) -> Store:
        from mergestream.store.store import Store

        store = Store(self.store, **self.running)
        if self.base:
            earlier = store.manifest.base.source
            store.relocate(self.base)
            if store.moved_base is None and (now := store.manifest.base.source) != earlier:
                store.progress.note(f"{store.storage} refers to the base at {now} from now on, no longer at {earlier}")
        return store


@dataclass(frozen=True)
class MethodOptions:
    """The base, the merging method with its parameters, and which tensors are linear weights."""

    base: str = argument("--base MODEL", MODEL, required=True)
    method: str | None = argument("--method M", "ledger (the default), opcm, average, …; see: mergestream methods")
    alpha: float | None = argument("--alpha", "short for --method opcm --set alpha=…", type=float)
    parameters: list[tuple[str, str]] = argument("--set KEY=VALUE", "a parameter of the method", type=pair)
    linear: list[str] = argument("--linear GLOB", "tensors to treat as linear weights")
    not_linear: list[str] = argument("--not-linear GLOB", "tensors not to treat as linear weights")

    def make_method(self) -> Method:
        """Create the method with its parameters."""
        from mergestream.methods import make_method

        if self.alpha is None:
            return make_method(self.method or "ledger", dict(self.parameters))
        return make_method(self.method or "opcm", {**dict(self.parameters), "alpha": self.alpha})


@dataclass(frozen=True)
class ExpertOptions:
    """How an expert's tensors and tokens are matched with the base's."""

    partial: bool = argument("--partial", "treat tensors that an expert lacks as unchanged")
    ignore: list[str] = argument("--ignore GLOB", "leave these tensors out")
    vocab: Vocab | None = argument(
        "--vocab",
        "tokens that the base lacks: drop them (base), keep them with their expert (union), "
        "or add them to the merged model (grow)",
        choices=("base", "union", "grow"),
    )


@dataclass(frozen=True)
class StoredExpertOptions(ExpertOptions):
    """How an expert is matched with the base of a store, which can also keep its head."""

    heads: list[str] = argument("--heads GLOB", "tensors that the base lacks: keep them per expert (export --task)")


@dataclass(frozen=True)
class AddingOptions(ExpertOptions):
    """How experts are matched and checked before they are merged."""

    allow_duplicate: bool = argument("--allow-duplicate", "accept an expert again, or the base itself")
    allow_other_base: bool = argument("--allow-other-base", "accept an expert that was not trained from this base")


@dataclass(frozen=True)
class GatedOptions(AddingOptions, StoredExpertOptions):
    """How experts are matched, checked, evaluated and tracked when a store adds them."""

    gates: list[str] = argument(
        "--gate CONDITION",
        "refuse an expert that fails it, as in 'kept>=0.6'; kept, relative_norm, norm, score; "
        "damage, held and max_cosine (ledger); lambda and distance (other methods)",
    )
    evaluate: str | None = argument(
        "--evaluate CMD",
        "run CMD on the merged model before each commit, with {model} for its directory; the score is the last "
        "number it prints, or the mean of the lm-eval results it writes to {scores}",
    )
    evaluate_timeout: int = argument(
        "--evaluate-timeout SECONDS", "stop CMD after this time, and add nothing (3600)", type=at_least(1), default=3600
    )
    log: list[str] = argument(
        "--log TRACKER[:TARGET]",
        "send the numbers of each step to wandb:PROJECT, mlflow:EXPERIMENT, tensorboard:DIR or jsonl:FILE",
    )


@dataclass(frozen=True)
class InputsOptions:
    """A few unlabelled inputs of one expert."""

    inputs: str | None = argument(
        "--inputs FILE",
        "unlabelled inputs of the expert: .jsonl, .txt, .parquet, .npz, .safetensors, or a directory of images",
    )
    inputs_count: int = argument("--inputs-count N", "how many of them are used (64)", type=at_least(2), default=64)
    inputs_tokens: int = argument(
        "--inputs-tokens N",
        "length of the answers that a generative model writes where none is given (32)",
        type=at_least(0),
        default=32,
    )

    def make_inputs(self) -> Inputs | None:
        """The inputs with their options; None where there are none."""
        from mergestream.inputs.reading import Inputs

        return None if self.inputs is None else Inputs(self.inputs, self.inputs_count, self.inputs_tokens)


@dataclass(frozen=True)
class OutputOptions:
    """How a model is written."""

    dtype: str | None = argument("--dtype TYPE", "bf16, fp16, fp32 or fp64 (as in the base)")
    max_shard_size: int = argument(
        "--max-shard-size SIZE", "maximum size of one file (5GB)", type=parse_size, default="5GB"
    )
    overwrite: bool = argument("--overwrite", "replace an earlier export")


def command_line() -> str:
    """The command as the user typed it, for the model card."""
    return shell_command(["mergestream", *sys.argv[1:]])
