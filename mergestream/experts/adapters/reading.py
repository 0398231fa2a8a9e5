"""PEFT adapters in: every adapted weight as its task vector s·B·A in factors, never multiplied out."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.algebra.pieces import is_finite, squared_norm
from mergestream.checkpoints import Checkpoint, TensorSpec
from mergestream.checkpoints.location import Location
from mergestream.checkpoints.reader import open_located
from mergestream.digest import text_digest
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.config import CONFIG_NAME, WAY_OUT, LoraConfig, read_config
from mergestream.experts.adapters.naming import translator
from mergestream.experts.names import Prefix, prefix_between
from mergestream.storage import StoredFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank

PREFIX = "base_model.model."
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_FACTOR = re.compile(r"(?P<module>.+)\.lora_((?P<embedding>embedding_)(?P<e>[AB])|(?P<w>[AB])(\.default)?\.weight)")
_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save(\.default)?)(?=\.)")
_AGAIN = "download or copy it again"


@dataclass(frozen=True)
class Factors:
    """The two factors of one module, by their names in the adapter's file."""

    embedding: bool
    names: dict[str, str] = field(default_factory=dict)  # of "A" and "B"


@dataclass(frozen=True)
class Term:
    """s·B·A of one module, or its transpose: what is added to one tensor of the base."""

    factors: Factors
    scaling: float
    rank: int
    transposed: bool


@dataclass(frozen=True)
class Adapter:
    """An adapter as it is on disk: factors per module, and parameters that were saved whole."""

    source: str
    directory: Path
    config: LoraConfig
    weights: Checkpoint
    factors: Mapping[str, Factors]
    """By module"""
    whole: Mapping[str, str]
    """Parameters (``modules_to_save``, biases), and their names in the file"""
    copies: Mapping[str, str]
    """The same for weights of the base that PEFT saved along unchanged"""

    def bind(
        self,
        tensors: Mapping[str, TensorSpec],
        spellings: Mapping[str, str] | None = None,
        conv1d: Collection[str] = (),
    ) -> BoundAdapter:
        """The adapter on a base with these tensors; everything but the values is checked.

        ``spellings`` gives the stored name for other names of a tensor (those of the model's class, those of
        tied weights); ``conv1d`` holds the weights that are known to be stored input × output.
        """
        known = {name: name for name in tensors} | dict(spellings or {})
        translate = translator([f"{module}.weight" for module in self.factors] or self.whole, known)
        targets: dict[str, str] = {}
        for module in self.factors:
            target = translate(f"{module}.weight")
            if target is None:
                raise MergestreamError(
                    f"{self.source} adapts the module {module!r}, but the base has no tensor {module}.weight: "
                    "it was made for another model"
                )
            targets[module] = target
        turned = {m: self._is_transposed(m, tensors[target].shape) for m, target in targets.items()}
        # A square weight does not show how it is stored; the model, its neighbours and the config may tell.
        neighbours = any(turned[m] for m, factors in self.factors.items() if not factors.embedding)
        terms: dict[str, list[Term]] = {}
        for module, target in targets.items():
            transposed = turned[module]
            if transposed is None:
                transposed = target in conv1d or neighbours or self.config.fan_in_fan_out
            scaling, rank = self.config.scaling(module), self.config.rank(module)
            terms.setdefault(target, []).append(Term(self.factors[module], scaling, rank, transposed))
        found = {name: translate(name) for name in (*self.whole, *self.copies)}
        whole = {target: key for name, key in self.whole.items() if (target := found[name])}
        copies = {target: key for name, key in self.copies.items() if (target := found[name])}
        self._check_whole(tensors, whole | copies)
        if both := whole.keys() & terms.keys():
            raise MergestreamError(f"{self.source} has both factors and a whole tensor for {min(both)}; {WAY_OUT}")
        extra = tuple(name for name in self.whole if found[name] is None)
        prefix = prefix_between({f"{module}.weight": target for module, target in targets.items()} or found)
        return BoundAdapter(self, tensors, terms, whole, copies, extra, prefix)

    def _is_transposed(self, module: str, shape: tuple[int, ...]) -> bool | None:
        """Whether (B·A)ᵀ has the base's shape and not B·A; None where both have."""
        factors, rank = self.factors[module], self.config.rank(module)
        a, b = (self.weights.tensors[factors.names[factor]].shape for factor in "AB")
        if len(a) < 2 or len(a) != len(b) or not a[0] == b[1] == rank or set(b[2:]) - {1}:
            raise MergestreamError(
                f"{self.file}: {factors.names['A']} of shape {list(a)} and {factors.names['B']} of shape "
                f"{list(b)} are no factors of rank {rank}, which {CONFIG_NAME} gives for {module}"
            )
        product = (b[0], *a[1:])
        plain = product == shape and not factors.embedding
        transposed = product[::-1] == shape and len(a) == 2
        if not plain and not transposed:
            resized = factors.embedding and product[:1] == shape[1:]
            reason = f"its vocabulary was resized; {WAY_OUT}" if resized else "it was made for another model"
            raise MergestreamError(
                f"{self.source} changes {module} by a tensor of shape {list(product)}, but the base's weight "
                f"has the shape {list(shape)}: {reason}"
            )
        return None if plain and transposed else transposed

    def _check_whole(self, tensors: Mapping[str, TensorSpec], whole: Mapping[str, str]) -> None:
        for target, key in whole.items():
            theirs, ours = self.weights.tensors[key].shape, tensors[target].shape
            if theirs[1:] != ours[1:]:  # that there are more or fewer rows may be the vocabulary: its vector tells
                raise MergestreamError(
                    f"{self.file}: {key} has the shape {list(theirs)}, but {target} of the base has {list(ours)}: "
                    "it was made for another model"
                )

    @property
    def file(self) -> str:
        return self.weights.source

    @property
    def fingerprint(self) -> str:
        """Changes when the configuration or the weights do."""
        return text_digest(f"{self.weights.fingerprint} {self.config.path.read_text(encoding='utf-8')}")

    def close(self) -> None:
        self.weights.close()


@dataclass(frozen=True)
class BoundAdapter:
    """An adapter on its base: what it does to which tensor."""

    adapter: Adapter
    tensors: Mapping[str, TensorSpec]
    terms: Mapping[str, list[Term]]
    """Tensors that change by s·B·A; where modules are tied, each of them may have a term"""
    whole: Mapping[str, str]
    """Tensors that are replaced, and their names in the file"""
    copies: Mapping[str, str]
    """Tensors that should be the base's own"""
    extra: tuple[str, ...]
    """Whole parameters that the base does not have"""
    prefix: Prefix

    def rank(self, name: str) -> int:
        """An upper bound for the rank of a tensor's task vector in factors."""
        return sum(term.rank for term in self.terms.get(name, ()))

    def delta(self, name: str, dtype: torch.dtype) -> LowRank:
        """The task vector of a tensor in factors; zero where the adapter has none for it."""
        import torch

        from mergestream.algebra.lowrank import LowRank

        shape = self.tensors[name].shape
        lefts, rights = [], []
        for term in self.terms.get(name, ()):
            a, b = (self.finite(term.factors.names[factor]).double().flatten(1) for factor in "AB")
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
        return MergestreamError(
            f"{self.adapter.file}: the factors of {name}, scaled by lora_alpha in {self.adapter.config.path.name}, are "
            "too large to be merged; repair or replace the adapter"
        )

    def finite(self, key: str) -> Tensor:
        """A tensor of the adapter's file; NaN and Inf are refused."""
        tensor = self.adapter.weights.read(key)
        if not is_finite(tensor):
            raise MergestreamError(
                f"tensor {key} in {self.adapter.file} holds NaN or Inf; nothing was merged, repair or replace the file"
            )
        return tensor


def find_adapter(location: Location) -> Location | None:
    """The directory of the adapter at a place, which may be that of its weights; None where there is none."""
    if location.path.name in _WEIGHTS:
        location = location.directory
    return location if (location.path / CONFIG_NAME).is_file() else None


def open_adapter(
    directory: Path, source: str | None = None, objects: Mapping[str, StoredFile] | None = None
) -> Adapter:
    """Open the adapter in a directory, which the user may know by another name (``source``), and whose weights may be
    in object storage.

    Configuration and headers are checked, no weight is read.
    """
    source, objects = source or str(directory), objects or {}
    config = read_config(directory)
    name = next((name for name in _WEIGHTS if name in objects or (directory / name).is_file()), None)
    if name is None:
        raise MergestreamError(f"{source} has {CONFIG_NAME}, but neither {' nor '.join(_WEIGHTS)}; {_AGAIN}")
    file = f"{source}/{name}"
    weights = open_located(Location(directory / name, file, objects))
    factors: dict[str, Factors] = {}
    whole: dict[str, str] = {}
    copies: dict[str, str] = {}
    for key in weights.tensors:
        name = _WRAPPERS.sub("", key.removeprefix(PREFIX))
        if match := _FACTOR.fullmatch(name):
            if not weights.tensors[key].is_float:
                raise MergestreamError(f"{file}: {key} is {weights.tensors[key].dtype}, not floating-point; {WAY_OUT}")
            found = factors.setdefault(match["module"], Factors(bool(match["embedding"])))
            found.names[match["e"] or match["w"]] = key
        elif "lora_" in name or "token_adapter" in name:
            raise MergestreamError(f"{file}: {key} is neither a factor nor a weight that mergestream knows; {WAY_OUT}")
        elif ".original_module." in key or key.endswith(".base_layer.weight"):
            copies[name] = key
        else:
            whole[name] = key
    for module, found in factors.items():
        for factor in {"A", "B"} - found.names.keys():
            raise MergestreamError(f"{file}: the factor {factor} of {module} is missing; {_AGAIN}")
    if not factors and not whole:
        raise MergestreamError(f"{file} holds no factors; {_AGAIN}")
    return Adapter(source, directory, config, weights, factors, whole, copies)
