"""PEFT adapters: open one, match it to the base, and give each weight's task vector s·B·A in factors."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from mergestream.algebra.pieces import is_finite, squared_norm
from mergestream.checkpoints import Checkpoint, TensorInfo, TensorSpec, torch_dtype
from mergestream.checkpoints.location import Location
from mergestream.checkpoints.reader import open_located
from mergestream.digest import text_digest
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.config import CONFIG_NAME, WAY_OUT, LoraConfig, read_config
from mergestream.experts.adapters.peft_merge import (
    COPIES,
    Module,
    PeftMerger,
    bind_module,
    key_pattern,
)
from mergestream.experts.names import Prefix, make_translator, prefix_between
from mergestream.storage import StoredFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank
    from mergestream.base.model import BaseModel

PREFIX = "base_model.model."
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_FACTOR = re.compile(r"(?P<module>.+)\.lora_((?P<embedding>embedding_)(?P<e>[AB])|(?P<w>[AB])(\.default)?\.weight)")
_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save(\.default)?)(?=\.)")
_AGAIN = "download or copy it again"


class Factors(NamedTuple):
    """The names of A and B of one module in the adapter's file."""

    a: str
    b: str
    is_embedding: bool


class Term(NamedTuple):
    """s·B·A of one module, or its transpose: what is added to one tensor of the base."""

    factors: Factors
    scaling: float
    rank: int
    transposed: bool


@dataclass(frozen=True)
class Adapter:
    """An adapter as it is stored: factors per module, and parameters that were saved in full."""

    source: str
    directory: Path | None
    config: LoraConfig
    weights: Checkpoint
    factors: Mapping[str, Factors]
    """By module"""
    whole: Mapping[str, str]
    """Parameters that were saved in full (``modules_to_save``, biases), and their names in the file"""
    unchanged: Mapping[str, str]
    """Weights of the base that PEFT saved unchanged, and their names in the file"""
    merged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names in the file of the tensors of each module that PEFT merges"""
    shared: tuple[str, ...] = ()
    """Names in the file of tensors that belong to all of these modules"""
    notes: tuple[str, ...] = ()
    """Sentences for the user"""

    @property
    def is_in_factors(self) -> bool:
        """Whether Δ needs no weights of the base."""
        return not self.whole and not self.merged

    def bind_to(self, model: BaseModel, base: Checkpoint | None = None) -> BoundAdapter:
        """Match the adapter to the tensors of a base, whose weights are needed where PEFT merges them."""
        tensors = {name: tensor for name, tensor in model.tensors.items() if not tensor.tied_to}
        bound = self.bind(tensors, {**model.spellings, **model.ties}, model.conv1d)
        if base is not None and bound.modules:
            bound.merger = PeftMerger(
                self.config, self.weights, bound.modules, self.shared, base, tensors, model.input_first
            )
        return bound

    def bind(
        self,
        tensors: Mapping[str, TensorSpec],
        spellings: Mapping[str, str] | None = None,
        conv1d: Collection[str] = (),
    ) -> BoundAdapter:
        """Match the adapter to a base with these tensors; everything except the values is checked.

        ``spellings`` maps other names of a tensor (in the model's class, or tied) to the stored one; ``conv1d`` holds
        the weights that are known to be stored as input × output.
        """
        known = {name: name for name in tensors} | dict(spellings or {})
        names = [f"{module}.weight" for module in self.factors]
        for module in self.merged:
            names += [f"{module}.{leaf}" for leaf in self.config.parameters_of(module) or ["weight"]]
        translate = make_translator(names or self.whole, known)
        targets: dict[str, str] = {}
        for module in self.factors:
            target = translate(f"{module}.weight")
            if target is None:
                raise MergestreamError(
                    f"{self.source} adapts the module {module!r}, but the base has no tensor {module}.weight: "
                    "it was made for another model"
                )
            targets[module] = target
        transposed = {m: self._is_transposed(m, tensors[target].shape) for m, target in targets.items()}
        # The shape of a square weight does not show how it is stored; the model, other modules and the config may.
        any_transposed = any(transposed[m] for m, factors in self.factors.items() if not factors.is_embedding)
        terms: dict[str, list[Term]] = {}
        for module, target in targets.items():
            turned = transposed[module]
            if turned is None:
                turned = target in conv1d or any_transposed or self.config.fan_in_fan_out
            scaling, rank = self.config.scaling(module), self.config.rank(module)
            terms.setdefault(target, []).append(Term(self.factors[module], scaling, rank, turned))
        found = {name: translate(name) for name in (*self.whole, *self.unchanged)}
        whole = {target: key for name, key in self.whole.items() if (target := found[name])}
        unchanged = {target: key for name, key in self.unchanged.items() if (target := found[name])}
        for target, key in (whole | unchanged).items():
            theirs, ours = self.weights.tensors[key].shape, tensors[target].shape
            if theirs[1:] != ours[1:]:  # another number of rows may be another vocabulary
                raise MergestreamError(
                    f"{self.file}: {key} has the shape {list(theirs)}, but {target} of the base has {list(ours)}: "
                    "it was made for another model"
                )
        modules = {name: bind_module(self.config, name, keys, translate) for name, keys in self.merged.items()}
        merged = {module.parameters[leaf] for module in modules.values() for leaf in module.changed}
        if both := (whole.keys() & (terms.keys() | merged)) | (terms.keys() & merged):
            raise MergestreamError(f"{self.source} has both factors and a full tensor for {min(both)}; {WAY_OUT}")
        extra = tuple(name for name in self.whole if found[name] is None)
        pairs = {f"{module}.weight": target for module, target in targets.items()}
        for name, bound in modules.items():
            pairs |= {f"{name}.{leaf}": target for leaf, target in bound.parameters.items()}
        prefix = prefix_between(pairs or found)
        return BoundAdapter(self, tensors, terms, whole, unchanged, modules, extra, prefix)

    def _is_transposed(self, module: str, shape: tuple[int, ...]) -> bool | None:
        """Whether (B·A)ᵀ has the base's shape and B·A has not; None if both have it."""
        factors, rank = self.factors[module], self.config.rank(module)
        a, b = self.weights.tensors[factors.a].shape, self.weights.tensors[factors.b].shape
        if len(a) < 2 or len(a) != len(b) or not a[0] == b[1] == rank or set(b[2:]) - {1}:
            raise MergestreamError(
                f"{self.file}: {factors.a} of shape {list(a)} and {factors.b} of shape {list(b)} are no factors of "
                f"rank {rank}, which {self.config.path.name} gives for {module}; {_AGAIN}"
            )
        product = (b[0], *a[1:])
        plain = product == shape and not factors.is_embedding
        transposed = product[::-1] == shape and len(a) == 2
        if not plain and not transposed:
            resized = factors.is_embedding and product[:1] == shape[1:]
            reason = f"its vocabulary was resized; {WAY_OUT}" if resized else "it was made for another model"
            raise MergestreamError(
                f"{self.source} changes {module} by a tensor of shape {list(product)}, but the base's weight "
                f"has the shape {list(shape)}: {reason}"
            )
        return None if plain and transposed else transposed

    @property
    def file(self) -> str:
        """The file with the weights, for error messages."""
        return self.weights.source

    def close(self) -> None:
        """Release the file."""
        self.weights.close()


@dataclass(eq=False)
class BoundAdapter(Checkpoint):
    """An adapter matched to its base: a checkpoint of the tensors that it changes, under the base's names."""

    adapter: Adapter
    base_tensors: Mapping[str, TensorSpec]
    terms: Mapping[str, list[Term]]
    """Tensors that change by s·B·A; tied modules may each have a term"""
    whole: Mapping[str, str]
    """Tensors that are replaced, and their names in the file"""
    unchanged: Mapping[str, str]
    """Tensors that must equal the base's, and their names in the file"""
    modules: Mapping[str, Module]
    """Modules that PEFT merges"""
    extra: tuple[str, ...]
    """Parameters saved in full that the base does not have"""
    prefix: Prefix
    merger: PeftMerger | None = None
    """Reads what PEFT has merged; None if nothing is merged, or the base has no weights"""

    def __post_init__(self) -> None:
        adapter, whole, base_tensors = self.adapter, self.whole, self.base_tensors
        self.weights, self.source, self.directory = adapter.weights, adapter.source, adapter.directory
        self.fingerprint = text_digest(f"{adapter.weights.fingerprint} {adapter.config.digest}")
        self._keys = {**whole, **{name: adapter.whole[name] for name in self.extra}}
        file = Path(adapter.file).name
        in_factors = {name: TensorInfo("F32", base_tensors[name].shape, file) for name in self.terms}
        in_full = {name: adapter.weights.tensors[key] for name, key in self._keys.items()}
        changed = {module.parameters[leaf] for module in self.modules.values() for leaf in module.changed}
        dtypes = {name: "F64" if base_tensors[name].dtype == "F64" else "F32" for name in changed}
        self.merged = {name: TensorInfo(dtype, base_tensors[name].shape, file) for name, dtype in dtypes.items()}
        self.copies = COPIES if changed else 0
        self.tensors = MappingProxyType({**in_factors, **in_full, **self.merged})

    def read(self, name: str) -> Tensor:
        """Read a tensor that was saved in full, or that PEFT has merged."""
        if name not in self.merged:
            return self.finite(self._keys[name])
        assert self.merger is not None
        return self.merger.read(name, torch_dtype(self.merged[name].dtype))

    def close(self) -> None:
        self.weights.close()

    def rank(self, name: str) -> int:
        """An upper bound of the rank of a tensor's task vector in factors."""
        return sum(term.rank for term in self.terms.get(name, ()))

    def delta(self, name: str, dtype: torch.dtype) -> LowRank:
        """The task vector of a tensor in factors; zero if the adapter has no factors for it."""
        import torch

        from mergestream.algebra.lowrank import LowRank

        shape = self.base_tensors[name].shape
        lefts, rights = [], []
        for term in self.terms.get(name, ()):
            a, b = (self.finite(key).double().flatten(1) for key in (term.factors.a, term.factors.b))
            left, right = (a.T, b.T) if term.transposed else (b, a)
            lefts.append(left * term.scaling)
            rights.append(right)
        if not lefts:
            return LowRank.zeros(shape, dtype)
        left, right = torch.cat(lefts, 1), torch.cat(rights)
        if not math.isfinite(squared_norm(left) + squared_norm(right)):
            raise self.too_large(name)
        delta = LowRank.from_factors(left, right, dtype, shape)
        if not math.sqrt(squared_norm(delta.core)) <= torch.finfo(dtype).max:
            raise self.too_large(name)
        return delta

    def too_large(self, name: str) -> MergestreamError:
        """The error for factors whose product overflows."""
        return MergestreamError(
            f"{self.adapter.file}: the factors of {name}, scaled by lora_alpha in {self.adapter.config.path.name}, are "
            "too large to be merged; repair or replace the adapter"
        )

    def finite(self, key: str) -> Tensor:
        """Read a tensor of the adapter's file; NaN and Inf are refused."""
        tensor = self.weights.read(key)
        if not is_finite(tensor):
            raise MergestreamError(
                f"tensor {key} in {self.adapter.file} holds NaN or Inf; nothing was merged, repair or replace the file"
            )
        return tensor


def find_adapter(location: Location) -> Location | None:
    """The directory of the adapter at a location, which may be its weight file; None if there is no adapter."""
    if location.path.name in _WEIGHTS:
        location = location.directory
    return location if (location.path / CONFIG_NAME).is_file() else None


def open_adapter(
    directory: Path, source: str | None = None, objects: Mapping[str, StoredFile] | None = None
) -> Adapter:
    """Open the adapter in a directory, and check configuration and headers; no weight is read.

    ``source`` is the name to print, and ``objects`` are its files in object storage.
    """
    source, objects = source or str(directory), objects or {}
    config = read_config(directory)
    name = next((name for name in _WEIGHTS if name in objects or (directory / name).is_file()), None)
    if name is None:
        raise MergestreamError(f"{source} has {CONFIG_NAME}, but neither {' nor '.join(_WEIGHTS)}; {_AGAIN}")
    weights = open_located(Location(directory / name, f"{source}/{name}", objects))
    return make_adapter(source, directory, config, weights)


def make_adapter(source: str, directory: Path | None, config: LoraConfig, weights: Checkpoint) -> Adapter:
    """The adapter with these tensors, sorted by what PEFT's names say of them."""
    file = weights.source
    pairs: dict[str, dict[str, str]] = {}
    embeddings: set[str] = set()
    whole: dict[str, str] = {}
    unchanged: dict[str, str] = {}
    merged: dict[str, list[str]] = {}
    shared: list[str] = []
    pattern = key_pattern(config) if config.reason else None
    for key in weights.tensors:
        name = _WRAPPERS.sub("", key.removeprefix(PREFIX))
        match = _FACTOR.fullmatch(name)
        if match and not (pattern and config.is_merged_by_peft(match["module"])):
            if not weights.tensors[key].is_float:
                raise MergestreamError(f"{file}: {key} is {weights.tensors[key].dtype}, not floating-point; {WAY_OUT}")
            pairs.setdefault(match["module"], {})[match["e"] or match["w"]] = key
            if match["embedding"]:
                embeddings.add(match["module"])
        elif pattern and not key.startswith(PREFIX):
            shared.append(key)
        elif pattern and (match := pattern.fullmatch(name)):
            merged.setdefault(match["module"], []).append(key)
        elif "lora_" in name or "token_adapter" in name:
            raise MergestreamError(f"{file}: {key} is neither a factor nor a weight that mergestream knows; {WAY_OUT}")
        elif ".original_module." in key or key.endswith(".base_layer.weight"):
            unchanged[name] = key
        else:
            whole[name] = key
    for module, pair in pairs.items():
        for factor in {"A", "B"} - pair.keys():
            raise MergestreamError(f"{file}: the factor {factor} of {module} is missing; {_AGAIN}")
    if not pairs and not whole and not merged:
        raise MergestreamError(f"{file} holds no factors; {_AGAIN}")
    factors = {module: Factors(pair["A"], pair["B"], module in embeddings) for module, pair in pairs.items()}
    found = {module: tuple(keys) for module, keys in merged.items()}
    notes = (f"{source}: PEFT merges it into the base, one module at a time ({config.reason})",) if merged else ()
    return Adapter(source, directory, config, weights, factors, whole, unchanged, found, tuple(shared), notes)
