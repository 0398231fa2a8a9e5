"""The base model as a store knows it: what each of its tensors is, and its digest."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from mergestream.algebra.pieces import LARGEST_NORM, SquaredNorm, is_finite, ranges
from mergestream.base.roles import Role, find_roles, model_names, tied_names
from mergestream.checkpoints import DTYPES, Checkpoint, TensorSpec
from mergestream.checkpoints.safetensors import MAX_DIMENSIONS
from mergestream.digest import TensorHasher, combined_digest
from mergestream.engine import Engine, LocalEngine
from mergestream.errors import DamagedError, MergestreamError, UsageError
from mergestream.progress import Progress, default_progress
from mergestream.schema import Magnitude, invalid_file, validate
from mergestream.sizes import counted

MAX_ELEMENTS = 2**40
"""Of a tensor that a manifest may speak of: what only passes by as zeros takes time, too"""


@dataclass(frozen=True)
class BaseTensor(TensorSpec):
    """One tensor of the base: its form, what it is and by which rule, and its digest."""

    role: Role
    rule: str
    tied_to: str | None
    digest: str
    """Empty where the base was not measured: then it is not verified either"""
    norm: Magnitude
    """0 for integers"""
    module: str | None = None
    """The class of the module whose weight it is (``torch.nn.Conv2d``, ``Conv1D``), where the architecture tells"""

    @cached_property
    def merges(self) -> bool:
        """Whether it has a state of its own: tied names, heads and integers have none."""
        return self.role in ("linear", "embedding", "other")

    @cached_property
    def state_dtype(self) -> str:
        """Task vectors and states are float32, and float64 for a float64 model."""
        return "F64" if self.dtype == "F64" else "F32"


@dataclass(frozen=True)
class BaseModel:
    """θ⁰: where it is, and all that must be known of it without opening it."""

    source: str
    tensors: Mapping[str, BaseTensor]
    tied_names: Mapping[str, str]
    """Names that the base does not store but an expert may, because they are tied to another."""
    linear: tuple[str, ...]
    """The globs that it was examined with, as ``not_linear`` and ``heads``"""
    not_linear: tuple[str, ...]
    heads: tuple[str, ...]
    spellings: Mapping[str, str]
    """What the model's class calls a tensor, where it is stored under another name"""
    given: str = ""
    """How the user has named it; empty where that is not known"""

    def __repr__(self) -> str:
        return f"<BaseModel {self.source!r}: {counted(len(self.tensors), 'tensor')}>"

    @classmethod
    def examine(
        cls,
        checkpoint: Checkpoint,
        *,
        linear: Sequence[str] = (),
        not_linear: Sequence[str] = (),
        heads: Sequence[str] = (),
        measure: bool = True,
        engine: Engine | None = None,
        progress: Progress | None = None,
    ) -> BaseModel:
        """Find out what each tensor is, and measure them all; without ``measure`` no weight is read."""
        parts = find_roles(checkpoint, linear=linear, not_linear=not_linear, heads=heads)
        if not any(part.role in ("linear", "embedding", "other") for part in parts.values()):
            raise MergestreamError(f"{checkpoint.source} has no floating-point tensor to merge")
        measured = dict.fromkeys(parts, Measured("", 0.0))
        if measure:
            measured = measure_tensors(checkpoint, list(parts), engine or LocalEngine(), progress or default_progress())
        tensors = {
            name: BaseTensor(info.dtype, info.shape, **vars(parts[name]), **measured[name]._asdict())
            for name, info in checkpoint.tensors.items()
        }
        ties, spellings = tied_names(checkpoint, parts), model_names(checkpoint)
        return cls(checkpoint.source, tensors, ties, tuple(linear), tuple(not_linear), tuple(heads), spellings)

    @cached_property
    def measured(self) -> bool:
        """Whether the weights have been read: without them there are no digests to check."""
        return all(tensor.digest for tensor in self.tensors.values())

    @cached_property
    def merged(self) -> tuple[str, ...]:
        """The tensors that have a state."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.merges)

    @cached_property
    def digest(self) -> str:
        return combined_digest({name: tensor.digest for name, tensor in self.tensors.items()})

    @cached_property
    def ties(self) -> dict[str, str]:
        """Every name that stands for another tensor, stored or not, and that tensor."""
        stored = {name: tensor.tied_to for name, tensor in self.tensors.items() if tensor.tied_to}
        return {**stored, **self.tied_names}

    @cached_property
    def conv1d(self) -> frozenset[str]:
        """Weights that are stored input × output."""
        return frozenset(name for name, tensor in self.tensors.items() if tensor.module == "Conv1D")

    @property
    def has_head(self) -> bool:
        """Whether it has tensors of its own where every expert keeps its head."""
        return any(tensor.role == "head" for tensor in self.tensors.values())

    def is_head(self, name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in self.heads)

    def with_heads(self, globs: Sequence[str]) -> BaseModel:
        """The same base, of whose experts more is kept: only what it has not itself, for that is merged."""
        for glob in globs:
            for name, tensor in self.tensors.items():
                if tensor.role != "head" and fnmatchcase(name, glob):
                    raise UsageError(
                        f"--heads {glob} matches {name}, which is merged in this store; only a new one, made with it, "
                        "keeps that with each expert"
                    )
        return dataclasses.replace(self, heads=tuple(dict.fromkeys((*self.heads, *globs))))

    def check(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint that, by its headers, is not this base."""
        # What is only known by its configuration may be stored in any dtype.
        found, known = (
            {name: (spec.dtype if self.measured else "", spec.shape) for name, spec in tensors.items()}
            for tensors in (checkpoint.tensors, self.tensors)
        )
        if found != known:
            name = min(name for name in found.keys() | known.keys() if found.get(name) != known.get(name))
            raise MergestreamError(
                f"{checkpoint.source} is not the base of this store (they differ in tensor {name}); "
                "pass the right one with --base"
            )

    def check_digest(self, checkpoint: Checkpoint, engine: Engine, progress: Progress) -> None:
        """Refuse a checkpoint that is not, bit for bit, this base."""
        self.check(checkpoint)
        measured = measure_tensors(checkpoint, list(self.tensors), engine, progress)
        for name, tensor in self.tensors.items():
            if measured[name].digest != tensor.digest:
                raise base_changed(name, checkpoint)

    def with_weights(self, checkpoint: Checkpoint, engine: Engine, progress: Progress) -> BaseModel:
        """The same base, now that its weights are there: measured, and with the dtypes that are stored."""
        self.check(checkpoint)
        measured = measure_tensors(checkpoint, list(self.tensors), engine, progress)
        tensors = {}
        for name, tensor in self.tensors.items():
            dtype = checkpoint.tensors[name].dtype
            found = dataclasses.replace(tensor, dtype=dtype, **measured[name]._asdict())
            if found.state_dtype != tensor.state_dtype:
                raise MergestreamError(
                    f"{checkpoint.source} holds {name} as {dtype}, but the store was made for {tensor.dtype}"
                )
            tensors[name] = found
        return dataclasses.replace(self, source=checkpoint.source, tensors=tensors)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "digest": self.digest}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], path: Path | str) -> BaseModel:
        """From what a manifest, at ``path``, says of it."""
        model = validate({"linear": [], "not_linear": [], **data}, cls, path)
        for name, tensor in model.tensors.items():
            if fault := _fault(name, tensor, model):
                raise invalid_file(path, f"of {name} it says that {fault}")
        if unknown := set(model.tied_names.values()) - model.tensors.keys():
            raise invalid_file(path, f"{min(unknown)}, to which others are tied, is not in it")
        return model if "linear" in data else _from_format_1(model)


def _fault(name: str, tensor: BaseTensor, model: BaseModel) -> str | None:
    """What no tensor of a base can be; None where all is well."""
    if name == "__metadata__" or tensor.dtype not in DTYPES:
        return f"its type is {tensor.dtype}"
    if len(tensor.shape) > MAX_DIMENSIONS or math.prod(max(n, 1) for n in tensor.shape) > MAX_ELEMENTS:
        return f"its shape is {list(tensor.shape)}"
    if tensor.merges and not tensor.is_float:
        return f"it is {tensor.role} and {tensor.dtype}"
    if tensor.role == "linear" and len(tensor.shape) not in (2, 3):
        return f"it is linear and of the shape {list(tensor.shape)}"
    tied_to = model.tensors.get(tensor.tied_to or name)
    if (tensor.role == "tied") != (tensor.tied_to is not None):
        return f"it is {tensor.role} and tied to {tensor.tied_to}"
    if tied_to is None or tied_to.shape != tensor.shape or (tied_to.role == "tied" and tied_to is not tensor):
        return f"it is tied to {tensor.tied_to}"
    return None


def _from_format_1(model: BaseModel) -> BaseModel:
    """With what the first manifests say in the sentences of the rules only: the globs, and the class of the module."""
    rules = [tensor.rule for tensor in model.tensors.values()]

    def globs(option: str) -> tuple[str, ...]:
        found = [rule.removeprefix(f"{option} ") for rule in rules if rule.startswith(f"{option} ")]
        return tuple(dict.fromkeys(found))

    def module(rule: str) -> str | None:
        owner = re.match(r"([\w.]+) in \w+", rule)
        return owner[1] if owner else None

    tensors = {name: dataclasses.replace(tensor, module=module(tensor.rule)) for name, tensor in model.tensors.items()}
    return dataclasses.replace(model, linear=globs("--linear"), not_linear=globs("--not-linear"), tensors=tensors)


def base_changed(name: str, checkpoint: Checkpoint) -> MergestreamError:
    return DamagedError(
        f"the base has changed since the store was made: tensor {name} in {checkpoint.source} has another "
        "digest; restore it, or pass the original with --base"
    )


class Measured(NamedTuple):
    digest: str
    norm: float


def measure_tensors(
    checkpoint: Checkpoint, names: Sequence[str], engine: Engine, progress: Progress
) -> dict[str, Measured]:
    """Digest and norm of each tensor; NaN and Inf are refused."""
    costs = {name: checkpoint.tensors[name].nbytes for name in names}
    measured = {}
    with progress.task("reading the base", sum(costs.values())) as advance:
        for name, result in engine.run(costs, lambda name: _measure(checkpoint, name)):
            measured[name] = result
            advance(costs[name])
    return measured


def _measure(checkpoint: Checkpoint, name: str) -> Measured:
    tensor = checkpoint.read(name)
    hasher, norm = TensorHasher(tensor.dtype, tensor.shape), SquaredNorm()
    flat = tensor.reshape(-1)
    for start, stop in ranges(tensor.numel()):
        hasher.update(flat[start:stop])
        if tensor.is_floating_point():
            norm.add(flat[start:stop])
    length = math.sqrt(norm.total())
    if not length <= LARGEST_NORM:
        raise unusable(name, checkpoint)
    return Measured(hasher.hexdigest(), length)


def unusable(name: str, checkpoint: Checkpoint) -> MergestreamError:
    """For a tensor that holds NaN or Inf, or that cannot be reckoned with."""
    fault = "is too large to be merged" if is_finite(checkpoint.read(name)) else "holds NaN or Inf"
    return MergestreamError(
        f"tensor {checkpoint.stored_name(name)} in {checkpoint.tensors[name].file} of {checkpoint.source} {fault}; "
        "nothing was merged, repair or replace the file"
    )
