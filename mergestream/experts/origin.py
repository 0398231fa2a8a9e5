"""Whether an expert was made from the base: by a checkpoint's weights, or by the model that an adapter names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mergestream.base.model import BaseModel
from mergestream.base.skeleton import under_names
from mergestream.checkpoints import Checkpoint
from mergestream.checkpoints.layout import model_config
from mergestream.checkpoints.location import Location, locate_here, without_revision
from mergestream.checkpoints.opening import open_located
from mergestream.digest import tensor_digest
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.vector import AdapterVector
from mergestream.experts.vector import TaskVector

OTHER_BASE = 0.7
"""Two unrelated models are about 1.4 apart, relative to their norm; fine-tuning moves 0.1 at most."""
_SAMPLE = 4
"""Weights that are compared bit by bit: enough to tell models apart, and read in no time"""
_FORM = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "n_embd", "n_layer", "n_head"),
)
"""What two configurations of one model agree in; names, types and token ids may differ between copies of it."""


class Origin(NamedTuple):
    """What is known of the model that an expert was made from."""

    other: bool = False
    """Whether it is another one than the base"""
    told: str | None = None
    """A sentence about it, where it is another one or cannot be known"""


def origin(vector: TaskVector, norms2: Mapping[str, float]) -> Origin:
    """``norms2`` has ‖Δ‖² of every tensor that was merged."""
    if isinstance(vector, AdapterVector):
        return _of_adapter(vector)
    closest = math.inf
    for distance in _distances(vector, norms2):
        if distance <= OTHER_BASE:
            return Origin()
        closest = min(closest, distance)
    if math.isinf(closest):  # no matrix to compare
        return Origin()
    return Origin(
        True,
        f"{vector.expert.source} was probably not fine-tuned from this base: even the closest of its matrices is "
        f"{closest:.2f} times the norm of the base's away from it",
    )


def _distances(vector: TaskVector, norms2: Mapping[str, float]) -> Iterator[float]:
    """Of each matrix of the expert, relative to the base's norm; small ones first, for one that is close is enough."""
    tensors = vector.model.tensors
    matrices = [name for name in norms2 if vector.fates[name] == "merged" and len(tensors[name].shape) >= 2]
    for name in sorted(matrices, key=vector.numel):
        norm = tensors[name].norm if vector.model.measured else float(vector.base.read(name).double().norm())
        if norm:
            yield math.sqrt(norms2[name]) / norm


def _of_adapter(vector: AdapterVector) -> Origin:
    adapter, base = vector.adapter.adapter, vector.model.source
    named = adapter.config.base
    if named is None:
        return Origin(told=f"{adapter.source} does not say which model it was made for; its shapes fit the base")
    here, ours = locate_here(named), locate_here(base)
    if _is_same_name(named, base) or (here is not None and here == ours):
        return Origin()
    difference = _difference(here, named, ours, vector) if here else None
    if difference:
        return Origin(True, f"{adapter.source} was made for {named}, which is not the base of this store: {difference}")
    if difference is None:
        return Origin(
            told=f"{adapter.source} was made for {named}, which cannot be compared with the base {base}; its shapes fit"
        )
    return Origin()


def _is_same_name(one: str, other: str) -> bool:
    """Of the same repository on the hub, or the very same path."""
    return without_revision(one).lower() == without_revision(other).lower()


def _difference(here: Path, named: str, ours: Path | None, vector: AdapterVector) -> str | None:
    """In what a model on this machine differs from the base: nothing where they are the same, None where that cannot be
    told."""
    config, own = _config(here), _config(ours)
    for field in _FORM:
        if field in config and field in own and config[field] != own[field]:
            return f"{field} is {config[field]} there and {own[field]} here"
    if config.get("quantization_config"):
        return None
    try:
        with open_located(Location(here, named)) as found:
            return _different_tensor(under_names(found, vector.model.tensors), vector.model, vector.base)
    except MergestreamError:
        return None


def _different_tensor(found: Checkpoint, model: BaseModel, base: Checkpoint) -> str | None:
    shared = [name for name in model.tensors if name in found.tensors]
    for name in shared:
        if found.tensors[name].shape != model.tensors[name].shape:
            theirs, ours = list(found.tensors[name].shape), list(model.tensors[name].shape)
            return f"{name} has the shape {theirs} there and {ours} here"
    known = model.measured or base.has_weights
    alike = [
        name for name in shared if model.tensors[name].role == "linear" and _dtype(found, name) == _dtype(model, name)
    ]
    sample = sorted(alike, key=lambda name: (model.tensors[name].numel, name))[:_SAMPLE] if known else []
    for name in sample:
        if tensor_digest(found.read(name)) != (model.tensors[name].digest or tensor_digest(base.read(name))):
            return f"{name} has other values there"
    return "" if sample else None


def _dtype(model: Checkpoint | BaseModel, name: str) -> str:
    return model.tensors[name].dtype


def _config(directory: Path | None) -> dict[str, Any]:
    try:
        return model_config(directory)
    except MergestreamError:
        return {}
