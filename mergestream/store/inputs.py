"""Statistics of an expert's inputs, ``inputs/NNNN``: measured and written once, and checked whenever they are read."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import nn

from mergestream.checkpoints import SafetensorsWriter, TensorSpec, dtype_name
from mergestream.digest import tensor_digest, text_digest
from mergestream.engine import Engine
from mergestream.files import to_json, write_text
from mergestream.inputs.moments import LayerMoments
from mergestream.inputs.reading import Inputs, Sample, read_inputs
from mergestream.inputs.statistics import InputStatistics, measure_statistics
from mergestream.ledger.method import Ledger
from mergestream.ledger.moment import Moment
from mergestream.ledger.routing import FeatureStatistics
from mergestream.ledger.soundness import find_fault
from mergestream.merging.plan import tensor_contexts
from mergestream.schema import BACKUP, Count, damaged
from mergestream.storage import Storage
from mergestream.store.expert import InputsEntry
from mergestream.store.manifest import Manifest
from mergestream.store.tensors import CheckedTensors, read_checked

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.base.model import BaseModel
    from mergestream.store.add import Candidate
    from mergestream.store.store import Store

INDEX, STEM = "inputs.json", "moments"
_PARTS = ("values", "vectors", "rest")
FEATURES = "features"
"""The name of the moment of the features; all others are named after a weight"""
_MEASURE_AGAIN = f"measure them again with mergestream calibrate, or {BACKUP}"


class _Index(TypedDict):
    """``inputs.json``"""

    count: Count
    """How many inputs there were"""
    features: Count
    """How many rows of features; 0 where there are none"""
    shared: dict[str, str]
    """By weight: the weight under whose name its moment is stored"""
    digests: dict[str, str]


def read_samples(store: Store, inputs: Inputs) -> list[Sample]:
    """Read the inputs; only a ledger has a place for what is measured on them."""
    store.manifest.require_ledger("takes inputs of an expert")
    return read_inputs(inputs.source, inputs.count, store.progress)


def measure_inputs(candidate: Candidate, inputs: Inputs, samples: Sequence[Sample], cut: int) -> InputStatistics:
    """Run the expert and its base on the samples; moments are as short as entries that ``cut`` experts share."""
    store, vector = candidate.store, candidate.vector
    if inputs.model is None and isinstance(candidate.given, nn.Module):
        inputs = dataclasses.replace(inputs, model=candidate.given)
    manifest = dataclasses.replace(store.manifest, base=vector.model)
    weights = [name for name, action in vector.actions.items() if action == "merged" and name in vector.model.tensors]
    return measure_statistics(
        vector,
        candidate.opened,
        _directions(manifest, weights, cut),
        samples,
        inputs,
        dtype=getattr(torch, str(manifest.parameters["entries"])),
        engine=store.engine,
        progress=store.progress,
    )


def _directions(manifest: Manifest, weights: Sequence[str], cut: int) -> dict[str, int]:
    """How many directions a moment keeps for each linear weight: ⌊β·r/cut⌋, as the entry of a full fine-tune."""
    found, method, contexts = {}, manifest.make_method(), tensor_contexts(manifest.base, 1)
    assert isinstance(method, Ledger)
    for name in weights:
        context = contexts[name]
        if context.linear and len(context.shape) == 2:
            found[name] = method.share(context, cut) if method.is_cut(context) else min(context.shape)
    return found


def shorten_inputs(store: Store, manifest: Manifest, entry: InputsEntry, folder: str, cut: int) -> str:
    """Write the statistics with moments for ``cut`` experts; returns the digest of their index."""
    with closing(InputsReader(store.storage, entry, manifest.base)) as reader:
        found = reader.statistics()
        kept = _directions(manifest, list(found.layers.shared), cut)
        longest: dict[str, int] = {}
        for weight, stored in found.layers.shared.items():
            longest[stored] = max(kept[weight], longest.get(stored, 0))
        moments = {stored: moment.cut(longest[stored]) for stored, moment in found.layers.moments.items()}
        layers = dataclasses.replace(found.layers, moments=moments)
        return write_inputs(store.storage, folder, dataclasses.replace(found, layers=layers))


def write_inputs(storage: Storage, folder: str, found: InputStatistics) -> str:
    """Write the statistics into a new folder; returns the digest of their index."""
    tensors: dict[str, Tensor] = {}
    for name, moment in found.layers.moments.items():
        tensors |= _moment_tensors(name, moment)
    if found.features:
        tensors |= {"mean": found.features.mean, **_moment_tensors(FEATURES, found.features.scatter)}
    index = {
        "count": found.count,
        "features": found.features.count if found.features else 0,
        "shared": dict(found.layers.shared),
        "digests": {name: tensor_digest(tensor) for name, tensor in tensors.items()},
    }
    text = to_json(index)
    with storage.drafting(f"inputs/{folder}") as directory:
        layout = {name: TensorSpec(dtype_name(part.dtype), tuple(part.shape)) for name, part in tensors.items()}
        with SafetensorsWriter(directory, layout, prefix=STEM) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
        write_text(directory / INDEX, text)
    return text_digest(text)


class InputsReader:
    """The statistics of one expert's inputs, checked as they are read: a store may come from somebody else."""

    def __init__(self, storage: Storage, entry: InputsEntry, base: BaseModel) -> None:
        """``entry`` is what the manifest says of them."""
        folder = f"inputs/{entry.folder}"
        self._where = f"{storage}/{folder}/{INDEX}"
        self.index = read_checked(storage, f"{folder}/{INDEX}", _Index, entry.record, _MEASURE_AGAIN)
        self._stored = [*dict.fromkeys(self.index["shared"].values()), *([FEATURES] if self.index["features"] else [])]
        self._tensors = CheckedTensors(storage, folder, STEM, self.index["digests"], _MEASURE_AGAIN)
        if misfit := self._find_misfit(base):
            self.close()
            raise damaged(self._where, misfit, _MEASURE_AGAIN)

    def _find_misfit(self, base: BaseModel) -> str | None:
        """What is wrong by the headers alone: a tensor is missing, unknown, or not as wide as the inputs; or None."""
        found, features = self._tensors.tensors, ["mean"] if self.index["features"] else []
        expected = {*features, *(f"{part}:{name}" for name in self._stored for part in _PARTS)}
        if differing := expected ^ found.keys():
            return f"{min(differing)} is {'missing' if min(differing) in expected else 'unknown'}"
        widths = [(name, FEATURES, found[name].shape) for name in features]
        for weight, stored in self.index["shared"].items():
            is_linear = weight in base.tensors and base.tensors[weight].role == "linear"
            shape = base.tensors[weight].shape if is_linear else ()
            widths.append((weight, stored, shape[:1] if weight in base.conv1d else shape[1:]))
        misfits = (name for name, stored, width in widths if found[f"vectors:{stored}"].shape[1:] != width)
        return next((f"the moment for {name} does not have the width of its input" for name in misfits), None)

    def moment(self, weight: str) -> Moment | None:
        """The moment of the input of a layer, by the name of its weight; None where the layer was not run."""
        stored = self.index["shared"].get(weight)
        return None if stored is None else self._moment(stored)

    def features(self) -> FeatureStatistics | None:
        """The features of the base on the same inputs, if there are any."""
        count = self.index["features"]
        if not count:
            return None
        return FeatureStatistics(count, self._tensors.read("mean").double(), self._moment(FEATURES))

    def statistics(self) -> InputStatistics:
        """All moments and features."""
        shared = self.index["shared"]
        moments = {name: self._moment(name) for name in dict.fromkeys(shared.values())}
        return InputStatistics(LayerMoments(shared, moments), self.features(), self.index["count"])

    def _moment(self, name: str, *, thorough: bool = False) -> Moment:
        values, vectors, rest = self._tensors.read_all([f"{part}:{name}" for part in _PARTS]).values()
        fits = vectors.ndim == 2 and values.shape == vectors.shape[:1] and rest.shape == ()
        if not fits or not (values.dtype == rest.dtype == torch.float64 and vectors.is_floating_point()):
            fault: str | None = "its tensors do not fit each other"
        else:  # the matrix is symmetric and positive semidefinite: its eigenvalues are its singular values
            fault = find_fault({"sigma": values, "right": vectors, "rest": rest}, thorough=thorough)
        if fault:
            raise damaged(self._where, f"the moment of {name} cannot be right: {fault}", _MEASURE_AGAIN)
        return Moment(values, vectors, float(rest))

    def verify(self, engine: Engine) -> None:
        """Read and check everything; directions must be orthogonal, too."""
        sizes = {name: self._tensors.tensors[f"vectors:{name}"].nbytes for name in self._stored}
        deque(engine.run(sizes, partial(self._moment, thorough=True)), maxlen=0)
        self.features()

    def close(self) -> None:
        self._tensors.close()


def _moment_tensors(name: str, moment: Moment) -> dict[str, Tensor]:
    rest = torch.tensor(moment.rest, dtype=torch.float64)
    return {f"values:{name}": moment.values, f"vectors:{name}": moment.vectors, f"rest:{name}": rest}
