"""What transformers knows about a model: the module of each tensor, and which tensors are tied.

The model is built on the meta device from ``config.json`` alone: no memory, no weights, no remote code, no network.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mergestream.checkpoints import TensorSpec, dtype_name
from mergestream.checkpoints.meta_model import build_on_meta, check_config_numbers, quiet_and_offline
from mergestream.errors import MergestreamError
from mergestream.files import read_json

if TYPE_CHECKING:
    from torch import nn


Kind = Literal["linear", "embedding", "torch", "custom"]
"""The weight of a linear layer or an embedding; otherwise who wrote the module: torch or the model's authors."""


@dataclass(frozen=True)
class Slot:
    """A parameter or buffer of the model."""

    module: str
    """The class of its module, such as ``torch.nn.Linear`` or ``Conv1D``"""
    leaf: str
    """Its name in the module"""
    kind: Kind
    spec: TensorSpec | None
    """None for computed buffers, which checkpoints do not hold"""

    @property
    def owner(self) -> str:
        """The module, to be printed."""
        return self.module if self.is_weight else f"{self.leaf} of {self.module}"

    @property
    def is_weight(self) -> bool:
        """Whether the module calls it ``weight``."""
        return self.leaf == "weight"


@dataclass(frozen=True)
class Architecture:
    """The tensors of a model class."""

    name: str
    slots: Mapping[str, Slot]
    ties: tuple[tuple[str, ...], ...]
    """Groups of names in ``slots`` that are one tensor"""
    slot_of: Callable[[str], str | None]
    """The name in ``slots`` into which a stored name is loaded"""


def load_architecture(directory: Path) -> Architecture | str:
    """The architecture that ``config.json`` describes, or the reason why it is unknown."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        return "transformers not installed"
    try:
        with quiet_and_offline(transformers):
            return _describe(_build(directory, transformers))
    except Exception as error:  # transformers raises anything for a strange config; then names and shapes decide
        cause = error.__cause__ if isinstance(error, MergestreamError) else error
        if isinstance(cause, OSError) and cause.errno:  # a disk error must not change the roles
            raise
        return f"config.json not usable by transformers: {type(error).__name__}"


def _build(directory: Path, transformers: Any) -> Any:
    raw = read_json(directory / "config.json")
    model_class: Any = getattr(transformers, (raw.get("architectures") or [""])[0], None)
    if _is_model_class(model_class, transformers):
        config_class = model_class.config_class
    else:
        config_class = transformers.CONFIG_MAPPING[raw["model_type"]]
        model_class = transformers.MODEL_MAPPING[config_class]
    check_config_numbers(raw)
    config = config_class.from_pretrained(directory, local_files_only=True)
    if getattr(config, "use_pretrained_backbone", False):
        config.use_pretrained_backbone = False  # would download the backbone's weights
    return build_on_meta(lambda: model_class(config))


def _is_model_class(candidate: Any, transformers: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, transformers.PreTrainedModel)


def _describe(model: Any) -> Architecture:
    slots: dict[str, Slot] = {}
    names_of: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            name = f"{path}.{leaf}" if path else leaf
            computed = leaf in module._non_persistent_buffers_set
            spec = None if computed else TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))
            slots[name] = Slot(_class_name(module), leaf, _kind(module, leaf), spec)
            names_of.setdefault(id(tensor), []).append(name)
    ties = tuple(tuple(names) for names in names_of.values() if len(names) > 1)
    return Architecture(type(model).__name__, slots, ties, _name_matcher(model, slots))


def _class_name(module: nn.Module) -> str:
    kind = type(module)
    return f"torch.nn.{kind.__name__}" if kind.__module__.startswith("torch.nn") else kind.__name__


def _kind(module: nn.Module, leaf: str) -> Kind:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if leaf == "weight" and isinstance(module, nn.Linear | Conv1D):
        return "linear"
    if leaf == "weight" and isinstance(module, nn.Embedding):
        return "embedding"
    return "torch" if type(module).__module__.startswith("torch.") else "custom"


def _name_matcher(model: Any, slots: Mapping[str, Slot]) -> Callable[[str], str | None]:
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
