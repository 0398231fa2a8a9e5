"""Check whether an expert was fine-tuned from the base: by its weights, or by the model that an adapter names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mergestream.base.model import match_names
from mergestream.checkpoints import WEIGHT_SUFFIXES
from mergestream.checkpoints.location import Location, locate_here, without_revision
from mergestream.checkpoints.reader import open_located
from mergestream.digest import tensor_digest
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.adapter import BoundAdapter
from mergestream.experts.vector import TaskVector

OTHER_BASE = 0.7
"""Largest plausible ‖Δ‖/‖θ⁰‖ of a matrix: two unrelated models are about 1.4 apart, fine-tuning moves at most 0.1."""
_SAMPLE = 4
"""How many weights are compared bit by bit"""


class BaseCheck(NamedTuple):
    """The result of the check."""

    is_other: bool = False
    """Whether the expert was made from another base"""
    note: str | None = None
    """A sentence for the user if the base differs or is unknown"""


def check_base(vector: TaskVector, norms2: Mapping[str, float]) -> BaseCheck:
    """Check the base of an expert; ``norms2`` holds ‖Δ‖² of every merged tensor."""
    if vector.adapter:
        return _check_adapter(vector.adapter, vector)
    tensors, closest = vector.model.tensors, math.inf
    matrices = [name for name in norms2 if vector.actions[name] == "merged" and len(tensors[name].shape) >= 2]
    for name in sorted(matrices, key=lambda name: tensors[name].numel):  # one close matrix ends the search
        norm = tensors[name].norm if vector.model.measured else float(vector.base.read(name).double().norm())
        if norm:
            closest = min(closest, math.sqrt(norms2[name]) / norm)
        if closest <= OTHER_BASE:
            return BaseCheck()
    if math.isinf(closest):  # there is no matrix to compare
        return BaseCheck()
    return BaseCheck(
        True,
        f"{vector.expert.source} was probably not fine-tuned from this base: even its closest matrix differs from the "
        f"base by {closest:.2f} times the base's norm",
    )


def _check_adapter(adapter: BoundAdapter, vector: TaskVector) -> BaseCheck:
    base = vector.model.source
    named = adapter.config.fields.base_model_name_or_path
    if not named:
        return BaseCheck(note=f"{adapter.source} does not say which model it was made for; its shapes fit the base")
    here, ours = locate_here(named), locate_here(base)
    same_name = without_revision(named).lower() == without_revision(base).lower()
    is_called_alike = here is None and last_part(named).lower() == last_part(base).lower()
    if same_name or is_called_alike or (here is not None and here == ours):
        return BaseCheck()
    difference = _find_difference(here, named, vector) if here else None
    if difference == "":
        return BaseCheck()
    made_for = f"{adapter.source} was made for {named}, which"
    if difference:
        return BaseCheck(True, f"{made_for} is not the base of this store: {difference}")
    return BaseCheck(note=f"{made_for} cannot be compared with the base {base}; its shapes fit")


def last_part(source: str) -> str:
    """The last part of a path or hub id, without the suffix of a file."""
    path = Path(without_revision(source))
    return path.stem if path.suffix in WEIGHT_SUFFIXES else path.name


def _find_difference(here: Path, named: str, vector: TaskVector) -> str | None:
    """How a local model differs from the base, by all shapes and a sample of the weights.

    Empty if it does not; None if that is unknown, because its weights are missing, quantised or of another dtype.
    """
    model, base = vector.model, vector.base
    try:
        with open_located(Location(here, named)) as opened:
            found = match_names(opened, model.tensors)
            comparable = []
            for name in sorted(found.tensors.keys() & model.tensors.keys()):
                theirs, ours = found.tensors[name], model.tensors[name]
                if ours.shape != theirs.shape:
                    return f"{name} has the shape {list(theirs.shape)} there and {list(ours.shape)} here"
                if ours.role == "linear" and ours.dtype == theirs.dtype:
                    comparable.append((ours.numel, name))
            for _, name in sorted(comparable)[:_SAMPLE]:
                if tensor_digest(found.read(name)) != (model.tensors[name].digest or tensor_digest(base.read(name))):
                    return f"{name} has other values there"
            return "" if comparable else None
    except MergestreamError:
        return None
