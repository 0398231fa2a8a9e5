"""What transformers knows about a model: the module of each tensor, and which tensors are tied.

The model is built on the meta device from ``config.json`` alone: no memory, no weights, no remote code, no network.
Common architectures are known without transformers, which takes seconds to import: ``known_architectures.json`` lists
the tensors of each class; ``tests/base/known_architectures.py`` writes it.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mergestream.checkpoints import TensorSpec, dtype_name
from mergestream.checkpoints.layout import model_config
from mergestream.checkpoints.meta_model import build_on_meta, check_config_numbers, quiet_and_offline
from mergestream.errors import MergestreamError
from mergestream.escaping import one_line
from mergestream.files import read_json

if TYPE_CHECKING:
    from torch import nn

    from mergestream.checkpoints import Checkpoint


Kind = Literal["linear", "embedding", "other", "custom"]
"""The weight of a linear layer or an embedding; other tensors of torch's modules, or of the model's own modules"""


@dataclass(frozen=True)
class Slot:
    """A parameter or buffer of the model."""

    owner: str
    """Its module, to be printed: ``torch.nn.Linear``, ``bias of torch.nn.LayerNorm``"""
    module: str | None
    """The class of the module whose weight it is (``torch.nn.Conv2d``, ``Conv1D``)"""
    kind: Kind
    spec: TensorSpec | None = None
    """None for computed buffers, which checkpoints do not hold, and for classes that are known without transformers"""


@dataclass(frozen=True)
class Architecture:
    """The tensors of a model class; none if the class is unknown."""

    name: str = ""
    slots: Mapping[str, Slot] = field(default_factory=dict)
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names in ``slots`` that are one tensor"""
    slot_of: Callable[[str], str | None] = lambda name: None
    """The name in ``slots`` into which a stored name is loaded"""
    unknown: str = ""
    """Why the class is unknown; empty if there is no config"""


def find_architecture(checkpoint: Checkpoint) -> Architecture:
    """The architecture of a checkpoint: from the list if its class has all stored tensors, else from transformers."""
    try:
        config = model_config(checkpoint.directory)
        name = config["architectures"][0]
        known = _known_architectures()[name]
    except (MergestreamError, LookupError, TypeError):  # transformers says what is wrong
        return load_architecture(checkpoint.directory)
    kinds = {pattern: kind.split(" ") for kind, patterns in known["slots"].items() for pattern in patterns}
    prefix = f"{known['prefix']}."

    def slot_of(name: str) -> str | None:
        spellings = (name, prefix + name, name.removeprefix(prefix))
        return next((spelling for spelling in spellings if pattern_of(spelling) in kinds), None)

    is_tied = config.get("tie_word_embeddings", known["tied_by_default"])
    ties = tuple(map(tuple, known["ties" if is_tied else "untied"]))
    slots = {}
    for slot in (*map(slot_of, checkpoint.tensors), *(slot for group in ties for slot in group)):
        if slot is None:
            return load_architecture(checkpoint.directory)
        kind, module = kinds[pattern_of(slot)]
        leaf = slot.rpartition(".")[2]
        slots[slot] = Slot(module, module, kind) if leaf == "weight" else Slot(f"{leaf} of {module}", None, kind)
    return Architecture(name, slots, ties, slot_of)


def pattern_of(name: str) -> str:
    """A tensor's name with ``#`` for the numbers of layers."""
    return re.sub(r"\.\d+(?=\.)", ".#", name)


@cache
def _known_architectures() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(__file__).with_name("known_architectures.json").read_text("utf-8"))
    return content


def load_architecture(directory: Path | None) -> Architecture:
    """The architecture that the ``config.json`` in a directory describes."""
    if directory is None or not (directory / "config.json").is_file():
        return Architecture()
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        return Architecture(unknown="transformers not installed")
    try:
        with quiet_and_offline(transformers):
            return _describe(_build(directory, transformers))
    except Exception as error:  # transformers raises anything for a strange config; then names and shapes decide
        cause = error.__cause__ if isinstance(error, MergestreamError) else error
        if isinstance(cause, OSError) and cause.errno:  # a disk error must not change the roles
            raise
        name = type(error).__name__
        reasons = {"KeyError": f"{error} is missing or unknown", "TooLargeError": "it is too large"}
        why = one_line(reasons.get(name, f"it fails with {name}"), 100)
        return Architecture(unknown=f"transformers cannot build the model of config.json: {why}")


def _build(directory: Path, transformers: Any) -> Any:
    raw = read_json(directory / "config.json")
    model_class = find_model_class(raw, transformers)
    check_config_numbers(raw)
    config = model_class.config_class.from_pretrained(directory, local_files_only=True)
    if getattr(config, "use_pretrained_backbone", False):
        config.use_pretrained_backbone = False  # would download the backbone's weights
    return build_on_meta(model_class, config)


def find_model_class(config: Mapping[str, Any], transformers: Any) -> Any:
    """The class that a ``config.json`` names, or the class without a head for its ``model_type``."""
    named: Any = getattr(transformers, (config.get("architectures") or [""])[0], None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named
    return transformers.MODEL_MAPPING[transformers.CONFIG_MAPPING[config["model_type"]]]


def _describe(model: Any) -> Architecture:
    slots: dict[str, Slot] = {}
    names_of: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            name = f"{path}.{leaf}" if path else leaf
            computed = leaf in module._non_persistent_buffers_set
            spec = None if computed else TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))
            slots[name] = _make_slot(module, leaf, spec)
            names_of.setdefault(id(tensor), []).append(name)
    ties = tuple(tuple(names) for names in names_of.values() if len(names) > 1)
    return Architecture(type(model).__name__, slots, ties, name_matcher(model, slots))


def _make_slot(module: nn.Module, leaf: str, spec: TensorSpec | None) -> Slot:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    is_torch = type(module).__module__.startswith("torch.")
    kind: Kind = "other" if is_torch else "custom"
    name = f"torch.nn.{type(module).__name__}" if is_torch else type(module).__name__
    if leaf != "weight":
        return Slot(f"{leaf} of {name}", None, kind, spec)
    if isinstance(module, nn.Linear | Conv1D):
        kind = "linear"
    elif isinstance(module, nn.Embedding):
        kind = "embedding"
    return Slot(name, name, kind, spec)


def name_matcher(model: Any, slots: Collection[str]) -> Callable[[str], str | None]:
    """A function from stored names, with or without the base model's prefix, old or new, to names in ``slots``."""
    prefix = f"{model.base_model_prefix}."
    modernise = _modern_names(model)

    @cache
    def slot_of(name: str) -> str | None:
        for candidate in (name, modernise(name)):
            for spelling in (candidate, prefix + candidate, candidate.removeprefix(prefix)):
                if spelling in slots:
                    return spelling
        return None

    return slot_of


def _modern_names(model: Any) -> Callable[[str], str]:
    """A function that renames tensors of older checkpoints as transformers does."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return lambda name: name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        )
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    return lambda name: rename_source_key(name, renamings, converters)[0]
