"""PEFT adapters: open one, match it to the base, and give each weight's task vector s·B·A in factors."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mergestream.algebra.pieces import is_finite, squared_norm
from mergestream.checkpoints import Checkpoint, TensorInfo, torch_dtype
from mergestream.checkpoints.location import Location
from mergestream.checkpoints.reader import open_located
from mergestream.digest import tensor_digest, text_digest
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.config import CONFIG_NAME, WAY_OUT, LoraConfig, make_config
from mergestream.experts.adapters.peft_merge import COPIES, PeftMerger, bind_module, key_pattern
from mergestream.experts.names import make_translator, prefix_between
from mergestream.files import read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank
    from mergestream.base.model import BaseModel

PREFIX = "base_model.model."
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(embedding_)?(?P<side>[AB])((\.default)?\.weight)?")
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

    def close(self) -> None:
        """Release the file."""
        self.weights.close()


class BoundAdapter(Checkpoint):
    """An adapter matched to its base: a checkpoint of the tensors that it changes, under the base's names."""

    def __init__(self, adapter: Adapter, model: BaseModel, base: Checkpoint | None = None) -> None:
        """Match every module to a tensor of the base, and check everything except the values.

        ``base`` is needed only to read what PEFT merges.
        """
        self.config, self.weights, self.notes, self.model = adapter.config, adapter.weights, adapter.notes, model
        self.source, self.directory = adapter.source, adapter.directory
        self.fingerprint = text_digest(f"{self.weights.fingerprint} {adapter.config.digest}")
        names = {f"{module}.weight": module for module in adapter.factors}
        for module in adapter.merged:
            names |= {f"{module}.{leaf}": module for leaf in adapter.config.parameters_of(module) or ["weight"]}
        stored = {name: name for name, tensor in model.tensors.items() if not tensor.tied_to}
        translate = make_translator(names or adapter.whole, {**stored, **model.spellings, **model.ties})
        matched: dict[str, str] = {}
        self.terms: dict[str, list[Term]] = {}
        """Tensors that change by s·B·A; tied modules may each have a term"""
        for module, factors in adapter.factors.items():
            target = translate(f"{module}.weight")
            if target is None:
                raise MergestreamError(
                    f"{self.source} adapts the module {module!r}, but the base has no tensor {module}.weight: "
                    "it was made for another model"
                )
            matched[f"{module}.weight"] = target
            self.terms.setdefault(target, []).append(self._make_term(module, factors, target))
        modules = {name: bind_module(adapter.config, name, keys, translate) for name, keys in adapter.merged.items()}
        for name, module_in_base in modules.items():
            matched |= {f"{name}.{leaf}": target for leaf, target in module_in_base.parameters.items()}
        in_base = {name: target for name in (*adapter.whole, *adapter.unchanged) if (target := translate(name))}
        self.whole = {in_base.get(name, name): key for name, key in adapter.whole.items()}
        """Tensors that were saved in full, and their names in the file; the base may lack some"""
        self.unchanged = {in_base[name]: key for name, key in adapter.unchanged.items() if name in in_base}
        """Tensors that must equal the base's, and their names in the file"""
        file = Path(self.weights.source).name
        self.merged = {
            target: TensorInfo(model.tensors[target].state_dtype, model.tensors[target].shape, file)
            for target in dict.fromkeys(one.parameters[leaf] for one in modules.values() for leaf in one.changed)
        }
        """Tensors that PEFT merges"""
        in_factors = {target: TensorInfo("F32", model.tensors[target].shape, file) for target in self.terms}
        in_full = {name: self.weights.tensors[key] for name, key in self.whole.items()}
        self.tensors = {**in_factors, **in_full, **self.merged}
        if both := [name for name, count in Counter([*in_factors, *in_full, *self.merged]).items() if count > 1]:
            raise MergestreamError(f"{self.source} has both factors and a full tensor for {both[0]}; {WAY_OUT}")
        self.copies = COPIES if self.merged else 0
        self.prefix = prefix_between(matched or in_base)
        self._merger = PeftMerger(adapter, modules, model, base) if base else None

    def _make_term(self, module: str, factors: Factors, target: str) -> Term:
        """Check a module's factors; (B·A)ᵀ is added if that has the shape of the base's tensor."""
        rank, shape = self.config.rank(module), self.model.tensors[target].shape
        a, b = self.weights.tensors[factors.a].shape, self.weights.tensors[factors.b].shape
        if len(a) < 2 or len(a) != len(b) or not a[0] == b[1] == rank or set(b[2:]) - {1}:
            raise MergestreamError(
                f"{self.weights.source}: {factors.a} of shape {list(a)} and {factors.b} of shape {list(b)} are no "
                f"factors of rank {rank}, which {self.config.path.name} gives for {module}; {_AGAIN}"
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
        if plain and transposed:  # a square shape does not show how the weight is stored
            transposed = target in self.model.conv1d or bool(self.config.fields.fan_in_fan_out)
        return Term(factors, self.config.scaling(module), rank, transposed)

    def read(self, name: str) -> Tensor:
        """Read a tensor that was saved in full, or that PEFT has merged."""
        if name in self.whole:
            return self._read_finite(self.whole[name])
        assert self._merger is not None
        return self._merger.read(name, torch_dtype(self.merged[name].dtype))

    def close(self) -> None:
        self.weights.close()

    def delta(self, name: str, dtype: torch.dtype) -> LowRank:
        """The task vector of a tensor in factors; zero if the adapter has no factors for it."""
        import torch

        from mergestream.algebra.lowrank import LowRank

        shape = self.model.tensors[name].shape
        lefts, rights = [], []
        for term in self.terms.get(name, ()):
            a, b = (self._read_finite(key).double().flatten(1) for key in (term.factors.a, term.factors.b))
            left, right = (a.T, b.T) if term.transposed else (b, a)
            lefts.append(left * term.scaling)
            rights.append(right)
        if not lefts:
            return LowRank.zeros(shape, dtype)
        left, right = torch.cat(lefts, 1), torch.cat(rights)
        if math.isfinite(squared_norm(left) + squared_norm(right)):
            delta = LowRank.from_factors(left, right, dtype, shape)
            if math.sqrt(squared_norm(delta.core)) <= torch.finfo(dtype).max:
                return delta
        raise MergestreamError(
            f"{self.weights.source}: the factors of {name}, scaled by lora_alpha in {self.config.path.name}, "
            "are too large to be merged; repair or replace the adapter"
        )

    def digest(self, name: str) -> str:
        """Digest of a tensor's stored factors, their scaling and their orientation."""
        lines = [
            f"{term.scaling} {term.transposed} {tensor_digest(self.weights.read(key))}"
            for term in self.terms[name]
            for key in (term.factors.a, term.factors.b)
        ]
        return text_digest("\n".join(lines))

    def check_copy(self, name: str, base: Checkpoint) -> None:
        """Check that an embedding that PEFT saved beside its factors is the base's own."""
        import torch

        key = self.unchanged.get(name)
        if key and base.has_weights:
            ours = base.read(name)
            if not torch.equal(self.weights.read(key).to(ours.dtype), ours):
                raise MergestreamError(
                    f"{self.weights.source}: {key} is not {name} of the base: the adapter was made for another model"
                )

    def _read_finite(self, key: str) -> Tensor:
        """Read a tensor of the adapter's file; NaN and Inf are refused."""
        tensor = self.weights.read(key)
        if not is_finite(tensor):
            raise MergestreamError(
                f"tensor {key} in {self.weights.source} holds NaN or Inf; nothing was merged; repair or replace it"
            )
        return tensor


def find_adapter(location: Location) -> Location | None:
    """The directory of the adapter at a location, which may be its weight file; None if there is no adapter."""
    if location.path.name in _WEIGHTS:
        location = location.directory
    return location if (location.path / CONFIG_NAME).is_file() else None


def open_adapter(location: Location) -> Adapter:
    """Open the adapter in a directory, and check configuration and headers; no weight is read."""
    directory, source, objects = location
    config = make_config(directory / CONFIG_NAME, read_json(directory / CONFIG_NAME, finite=True))
    name = next((name for name in _WEIGHTS if name in location.names), None)
    if name is None:
        raise MergestreamError(f"{source} has {CONFIG_NAME}, but neither {' nor '.join(_WEIGHTS)}; {_AGAIN}")
    weights = open_located(Location(directory / name, f"{source}/{name}", objects))
    return make_adapter(source, directory, config, weights)


def make_adapter(source: str, directory: Path | None, config: LoraConfig, weights: Checkpoint) -> Adapter:
    """Sort the tensors of a file into an adapter, by the names that PEFT gives them."""
    file = weights.source
    pairs: dict[str, dict[str, str]] = {}
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
            pairs.setdefault(match["module"], {})[match["side"]] = key
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
    factors = {module: Factors(pair["A"], pair["B"], "_embedding_" in pair["A"]) for module, pair in pairs.items()}
    found = {module: tuple(keys) for module, keys in merged.items()}
    notes = (f"{source}: PEFT merges it into the base, one module at a time ({config.reason})",) if merged else ()
    return Adapter(source, directory, config, weights, factors, whole, unchanged, found, tuple(shared), notes)
