"""The base model θ⁰: opened with or without its weights; the role, digest and norm of each tensor.

Without weights, its ``config.json`` gives names and shapes, which is enough for adapters.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mergestream.algebra.pieces import LARGEST_NORM, SquaredNorm, is_finite, ranges
from mergestream.base.architecture import find_architecture, load_architecture
from mergestream.base.names import are_adapter_names
from mergestream.base.roles import TensorRole, find_roles, model_names, tied_names
from mergestream.checkpoints import DTYPES, FLOATS, Checkpoint, TensorInfo, TensorSpec
from mergestream.checkpoints.checkpoint import RenamedCheckpoint
from mergestream.checkpoints.layout import explain_directory, model_config, refuse_quantised
from mergestream.checkpoints.location import locate
from mergestream.checkpoints.reader import open_located
from mergestream.checkpoints.safetensors import MAX_DIMENSIONS
from mergestream.digest import TensorHasher, combined_digest
from mergestream.engine import Engine, LocalEngine
from mergestream.errors import DamagedError, MergestreamError, UsageError
from mergestream.progress import Progress, default_progress
from mergestream.schema import Magnitude, invalid_file, validate
from mergestream.sizes import counted

if TYPE_CHECKING:
    from torch import Tensor

_CONFIG = "config.json"
MAX_ELEMENTS = 2**40
"""Largest tensor that a manifest may describe: even zeros take time to process"""


@dataclass(frozen=True, kw_only=True)
class BaseTensor(TensorRole, TensorSpec):
    """One tensor of the base: dtype, shape, role and digest."""

    digest: str
    """Empty if the base was not measured; then it is not verified either"""
    norm: Magnitude
    """0 for integers"""

    @cached_property
    def merges(self) -> bool:
        """Whether the tensor is merged: tied names, heads and integers are not."""
        return self.role in ("linear", "embedding", "other")

    @cached_property
    def state_dtype(self) -> str:
        """The dtype of task vectors and states: float32, or float64 for a float64 model."""
        return "F64" if self.dtype == "F64" else "F32"


@dataclass(frozen=True)
class BaseModel:
    """The base θ⁰: its source, and what must be known about it without opening it."""

    source: str
    tensors: Mapping[str, BaseTensor]
    tied_names: Mapping[str, str]
    """Names that an expert may store and the base does not, because they are tied to a tensor of the base"""
    linear: tuple[str, ...]
    """The globs of ``--linear``; ``not_linear`` and ``heads`` likewise"""
    not_linear: tuple[str, ...]
    heads: tuple[str, ...]
    spellings: Mapping[str, str]
    """Names in the model's class to stored names, where they differ"""
    given: str = ""
    """The source as the user typed it; empty if unknown"""

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
        """Find the role of each tensor, and measure digests and norms; without ``measure`` no weight is read."""
        if are_adapter_names(checkpoint.tensors):
            raise MergestreamError(
                f"{checkpoint.source} is an adapter (LoRA), which is no base: give the model that it was made for, and "
                "add the adapter to the store"
            )
        architecture = find_architecture(checkpoint)
        roles = find_roles(checkpoint, architecture, linear=linear, not_linear=not_linear, heads=heads)
        measured = dict.fromkeys(roles, ("", 0.0))
        if measure:
            measured = measure_tensors(checkpoint, engine or LocalEngine(), progress or default_progress())
        tensors = {}
        for name, info in checkpoint.tensors.items():
            digest, norm = measured[name]
            tensors[name] = BaseTensor(info.dtype, info.shape, **vars(roles[name]), digest=digest, norm=norm)
        if not any(tensor.merges for tensor in tensors.values()):
            raise MergestreamError(f"{checkpoint.source} has no floating-point tensor to merge; give another base")
        ties, spellings = tied_names(architecture, roles), model_names(checkpoint, architecture)
        return cls(checkpoint.source, tensors, ties, tuple(linear), tuple(not_linear), tuple(heads), spellings)

    @cached_property
    def measured(self) -> bool:
        """Whether the weights were read; otherwise there are no digests to check."""
        return all(tensor.digest for tensor in self.tensors.values())

    @cached_property
    def merged(self) -> tuple[str, ...]:
        """The names of the tensors that are merged."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.merges)

    @cached_property
    def digest(self) -> str:
        """Digest of all tensors."""
        return combined_digest({name: tensor.digest for name, tensor in self.tensors.items()})

    @cached_property
    def ties(self) -> dict[str, str]:
        """Every tied name, stored or not, and the tensor that it stands for."""
        stored = {name: tensor.tied_to for name, tensor in self.tensors.items() if tensor.tied_to}
        return {**stored, **self.tied_names}

    @cached_property
    def conv1d(self) -> frozenset[str]:
        """Weights that are stored as input × output."""
        return frozenset(name for name, tensor in self.tensors.items() if tensor.module == "Conv1D")

    @cached_property
    def input_first(self) -> frozenset[str]:
        """Linear weights that are stored as input × output: GPT-2's, and stacks of experts as gpt-oss has them.

        The shapes of an expert's two weights show it: the input of the second is as long as the output of the first,
        or half as long, because gate and up projection are one weight.
        """
        tensors, found = self.tensors, set(self.conv1d)
        for name, tensor in tensors.items():
            first = name.removesuffix("down_proj") + "gate_up_proj"
            if first != name and first in tensors and len(tensor.shape) == len(tensors[first].shape) == 3:
                (_, a, b), (_, c, d) = tensors[first].shape, tensor.shape
                if (a, b) == (d, 2 * c) and (b, a) != (c, 2 * d):
                    found |= {first, name}
        return frozenset(found)

    @cached_property
    def matrices(self) -> int:
        """The number of linear matrices: a stack holds one per index of its first dimension."""
        linear = (tensor.shape for tensor in self.tensors.values() if tensor.role == "linear")
        return sum(shape[0] if len(shape) == 3 else 1 for shape in linear)

    def is_head(self, name: str) -> bool:
        """Whether a name matches a glob of ``--heads``."""
        return any(fnmatchcase(name, glob) for glob in self.heads)

    def with_heads(self, globs: Sequence[str]) -> BaseModel:
        """The same base with more globs for heads; they must not match a tensor that is merged."""
        for glob in globs:
            for name, tensor in self.tensors.items():
                if tensor.role != "head" and fnmatchcase(name, glob):
                    raise UsageError(
                        f"--heads {glob} matches {name}, which is merged in this store; to keep it with each expert, "
                        "create a new store with this option"
                    )
        return dataclasses.replace(self, heads=tuple(dict.fromkeys((*self.heads, *globs))))

    def check(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint whose headers are not those of this base."""
        # A base that is known only by its configuration may be stored in any dtype whose states are the same.
        found, known = (
            {name: (spec.dtype if self.measured else spec.dtype == "F64", spec.shape) for name, spec in tensors.items()}
            for tensors in (checkpoint.tensors, self.tensors)
        )
        if found != known:
            name = min(name for name in found.keys() | known.keys() if found.get(name) != known.get(name))
            raise MergestreamError(
                f"{checkpoint.source} is not the base of this store (they differ in tensor {name}); "
                "pass the right one with --base"
            )

    def check_digest(self, checkpoint: Checkpoint, engine: Engine, progress: Progress) -> None:
        """Refuse a checkpoint that is not bit-identical to this base."""
        measured = self.with_weights(checkpoint, engine, progress)
        for name, tensor in self.tensors.items():
            if measured.tensors[name].digest != tensor.digest:
                raise base_changed(name, checkpoint)

    def with_weights(self, checkpoint: Checkpoint, engine: Engine, progress: Progress) -> BaseModel:
        """The same base, measured from a checkpoint with its weights, and with the stored dtypes."""
        self.check(checkpoint)
        tensors = dict(self.tensors)
        for name, (digest, norm) in measure_tensors(checkpoint, engine, progress).items():
            dtype = checkpoint.tensors[name].dtype
            tensors[name] = dataclasses.replace(tensors[name], dtype=dtype, digest=digest, norm=norm)
        return dataclasses.replace(self, source=checkpoint.source, tensors=tensors)

    def to_json(self) -> dict[str, Any]:
        """The base's section of a manifest."""
        return {**dataclasses.asdict(self), "digest": self.digest}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], path: Path | str) -> BaseModel:
        """Read the base's section of the manifest at ``path``."""
        model = validate({"linear": [], "not_linear": [], **data}, cls, path)
        for name, tensor in model.tensors.items():
            if not _is_possible(name, tensor, model):
                kind = f"{tensor.role} of type {tensor.dtype} and shape {list(tensor.shape)}, tied to {tensor.tied_to}"
                raise invalid_file(path, f"{name} cannot be {kind}")
        if unknown := set(model.tied_names.values()) - model.tensors.keys():
            raise invalid_file(path, f"{min(unknown)}, to which others are tied, is not in it")
        return model if "linear" in data else _from_format_1(model)


def _is_possible(name: str, tensor: BaseTensor, model: BaseModel) -> bool:
    """Whether a base can have such a tensor."""
    original = model.tensors.get(tensor.tied_to or name)
    return (
        name != "__metadata__"
        and tensor.dtype in (FLOATS.values() if tensor.merges else DTYPES)
        and len(tensor.shape) in ((2, 3) if tensor.role == "linear" else range(MAX_DIMENSIONS + 1))
        and math.prod(max(n, 1) for n in tensor.shape) <= MAX_ELEMENTS
        and (tensor.role == "tied") == (tensor.tied_to is not None)
        and original is not None
        and original.shape == tensor.shape
        and (original is tensor or original.role != "tied")
    )


def _from_format_1(model: BaseModel) -> BaseModel:
    """Add globs and module classes, which manifests of format 1 only mention in the rules."""
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
    """The error for a tensor of the base whose digest has changed."""
    return DamagedError(
        f"the base has changed since the store was made: tensor {name} in {checkpoint.source} has another "
        "digest; restore it, or pass the original with --base"
    )


def measure_tensors(checkpoint: Checkpoint, engine: Engine, progress: Progress) -> dict[str, tuple[str, float]]:
    """Compute digest and norm of each tensor; refuse NaN and Inf."""
    costs = {name: info.nbytes for name, info in checkpoint.tensors.items()}
    measured = {}
    with progress.task("reading the base", sum(costs.values())) as advance:
        for name, result in engine.run(costs, lambda name: _measure(checkpoint, name)):
            measured[name] = result
            advance(costs[name])
    return measured


def _measure(checkpoint: Checkpoint, name: str) -> tuple[str, float]:
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
    return hasher.hexdigest(), length


def unusable(name: str, checkpoint: Checkpoint) -> MergestreamError:
    """The error for a tensor that holds NaN or Inf, or whose squared norm overflows."""
    fault = "is too large to be merged" if is_finite(checkpoint.read(name)) else "holds NaN or Inf"
    return MergestreamError(f"{checkpoint.place(name)} {fault}; nothing was merged; repair or replace it")


# --- opening the base -----------------------------------------------------------------------------------------


class ConfigOnlyBase(Checkpoint):
    """A base model without weights: its tensors are described, but cannot be read."""

    has_weights: ClassVar[bool] = False

    def __init__(self, source: str, directory: Path | None, tensors: Mapping[str, TensorSpec]) -> None:
        self.source, self.directory = source, directory
        self.tensors = {name: TensorInfo(spec.dtype, spec.shape, _CONFIG) for name, spec in tensors.items()}

    def read(self, name: str) -> Tensor:
        raise MergestreamError(
            f"tensor {name} of the base is needed, but only the configuration of {self.source} is known; "
            "pass --base with the model and its weights"
        )


def open_base(source: str | Path, *, config_only: bool) -> Checkpoint:
    """Open a base model; as a `ConfigOnlyBase` if it has no weights or ``config_only`` forbids their download."""
    location = locate(source, weights=not config_only)
    directory = location.path
    # Weights in the hub's cache are not used either: the result must not depend on an earlier run.
    config_only = config_only and location.source != str(directory)
    if (directory / _CONFIG).is_file() and explain_directory(location.names, str(directory), directory) is None:
        config_only = True
    return _from_config(directory, location.source) if config_only else open_located(location)


def match_names(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """Rename an older checkpoint's tensors to ``names``, the names in the model's class, if all of them are found."""
    if checkpoint.tensors.keys() == set(names):
        return checkpoint
    called = {stored: name for name, stored in model_names(checkpoint, find_architecture(checkpoint)).items()}
    stored = {called.get(name, name): name for name in checkpoint.tensors}
    if not stored.keys() >= set(names):
        return checkpoint
    return RenamedCheckpoint(checkpoint, {name: stored[name] for name in names})


def _from_config(directory: Path, source: str) -> ConfigOnlyBase:
    """Describe the tensors that a checkpoint would hold: tied tensors once, no computed buffers."""
    config = model_config(directory)
    refuse_quantised(directory)
    architecture = load_architecture(directory)
    if not architecture.slots:
        raise MergestreamError(
            f"{source} has no weights, and {_CONFIG} does not describe its tensors ({architecture.unknown}); "
            "give a base with weights"
        )
    tied = {name for group in architecture.ties for name in group[1:]}
    floats = FLOATS.get(str(config.get("dtype", config.get("torch_dtype"))), "F32")
    tensors = {
        name: TensorSpec(floats if slot.spec.is_float else slot.spec.dtype, slot.spec.shape)
        for name, slot in architecture.slots.items()
        if slot.spec is not None and name not in tied
    }
    return ConfigOnlyBase(source, directory, tensors)
