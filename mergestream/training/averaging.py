"""An average of a model's weights, updated while the model trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mergestream import EMA, Merger, Method
from mergestream.errors import MergestreamError, UsageError
from mergestream.files import DRAFT_SUFFIX, write_error
from mergestream.progress import NoProgress

_METADATA = "mergestream.averaging"
_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Wrapper classes of torch, and the attribute that holds the model"""
_SHARDED = {"ds_id": "DeepSpeed ZeRO-3", "placements": "FSDP2 or tensor parallelism"}
"""Attributes of sharded parameters, and what shards them"""


class Averaging:
    """Averages the trained weights of a model every few steps.

        averaging = Averaging(model, EMA(beta=0.99), every=10)
        for batch in batches:
            ...
            optimizer.step()
            averaging.step()
        with averaging.swap():
            evaluate(model)

    The average is in memory, in float32 or wider. The base θ⁰ is the model at the first update.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method | None = None,
        *,
        every: int = 1,
        start: int = 0,
        workers: int | None = None,
    ) -> None:
        """``method`` is `EMA` (the default), `LAWA` or `Average` (SWA).

        The average is updated at the multiples of ``every``, from step ``start`` on.
        """
        if every < 1:
            raise UsageError(f"every={every} must be at least 1")
        self.model, self.method = _unwrap(model), method or EMA()
        if self.method.remembers_experts:
            raise UsageError(f"{self.method.name} remembers every model it sees; average by EMA, LAWA or Average")
        self.every, self.start, self._workers = every, start, workers
        self.steps = 0
        """Number of optimiser steps"""
        self.merger: Merger | None = None
        """None before the first update"""
        self._swapped = False
        trained_tensors(self.model)  # refuse a model that cannot be averaged

    @property
    def updates(self) -> int:
        """Number of models in the average."""
        return len(self.merger.history) if self.merger else 0

    def step(self) -> bool:
        """Count an optimiser step; update the average if it is due, and return whether it was."""
        self.steps += 1
        due = self.steps >= self.start and self.steps % self.every == 0
        if due:
            self.update()
        return due

    def update(self) -> None:
        """Add the present weights to the average."""
        if self._swapped:
            raise UsageError("the model holds its average now; update it after the `swap` block")
        weights = trained_tensors(self.model)
        if self.merger is None:
            self.merger = Merger(_copy(weights), self.method, workers=self._workers, progress=NoProgress())
        elif changed := weights.keys() ^ set(self.merger.tensors):
            raise UsageError(
                f"{min(changed)} was trained at the first update or is trained now, but not both; start averaging "
                "when the set of trained parameters no longer changes (start=…)"
            )
        self.merger.add(weights)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averaged weights under the model's names and in its dtypes, without untrained tensors."""
        if self.merger is None:
            raise UsageError("nothing has been averaged yet")
        return self.merger.state_dict()

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Replace the model's weights by their average inside the block; the weights are always restored.

        Before the first update this changes nothing.
        """
        if self.merger is None or self._swapped:
            yield
            return
        averaged, everything = self.merger.state_dict(), _all_tensors(self.model)
        weights = {name: everything[name] for name in averaged}
        original = _copy(weights)
        self._swapped = True
        try:
            _copy_into(weights, averaged)
            yield
        finally:
            _copy_into(weights, original)
            self._swapped = False

    def save(self, path: str | Path) -> None:
        """Write the average to one file, from which `load` resumes."""
        path = Path(path)
        remembered = self.merger.remembered() if self.merger else {}
        beside = path.with_name(path.name + DRAFT_SUFFIX)
        try:
            save_file(remembered, beside, metadata={_METADATA: json.dumps({"steps": self.steps, **self._made_by})})
            beside.replace(path)
        except (OSError, SafetensorError) as error:
            beside.unlink(missing_ok=True)
            raise write_error(path, error if isinstance(error, OSError) else OSError(0, str(error))) from error

    def load(self, path: str | Path) -> None:
        """Resume from a file of `save`, with the same model and method."""
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
                remembered = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            steps, made_by = about.pop("steps"), about
        except (OSError, SafetensorError) as error:
            raise MergestreamError(f"{path} cannot be read: {error}") from error
        except (ValueError, KeyError, AttributeError):
            raise MergestreamError(f"{path} was not written by Averaging.save") from None
        if made_by != self._made_by:
            raise UsageError(f"{path} has an average by {made_by}, but this one is by {self._made_by}")
        self.merger, self.steps = self._recall(remembered, path) if remembered else None, steps

    @property
    def _made_by(self) -> dict[str, object]:
        return {"method": self.method.name, "parameters": self.method.parameters}

    def _recall(self, remembered: dict[str, Tensor], path: str | Path) -> Merger:
        weights = trained_tensors(self.model)
        try:
            merger = Merger.recall(remembered, self.method, workers=self._workers)
        except (KeyError, ValueError, TypeError) as error:
            raise MergestreamError(f"{path} does not have the expected content: {error}") from None
        ours, theirs = ({name: t.shape for name, t in found.items()} for found in (weights, merger.tensors))
        if differing := [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]:
            raise MergestreamError(f"{path} belongs to another model: tensor {min(differing)} differs")
        return merger


def _copy(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in weights.items()}


@torch.no_grad()
def _copy_into(weights: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Copy in place, because optimisers and compiled graphs refer to the memory."""
    for name, tensor in weights.items():
        tensor.copy_(values[name])


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of DDP and torch.compile."""
    while attribute := _WRAPPERS.get(type(model).__name__):
        model = getattr(model, attribute)
    return model


def _all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers; tied ones appear once."""
    parameters, buffers = model.named_parameters(), model.named_buffers()
    return {name: tensor.detach() for found in (parameters, buffers) for name, tensor in found}


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that take a gradient, and the floating-point buffers that are saved."""
    _refuse_sharded(model)
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not wanted:
        raise UsageError(f"no parameter of {type(model).__name__} takes a gradient; there is nothing to average")
    saved = model.state_dict().keys()
    wanted |= {name for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()}
    return {name: tensor for name, tensor in _all_tensors(model).items() if name in wanted}


def _refuse_sharded(model: nn.Module) -> None:
    """Refuse sharded parameters: their average could be computed, but not evaluated or saved here."""
    by = next((who for p in model.parameters() for mark, who in _SHARDED.items() if hasattr(p, mark)), None)
    if by is None and any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        by = "FSDP"
    if by is not None:
        raise UsageError(
            f"the parameters are sharded by {by}, but only unsharded ones can be averaged while training; "
            "average the saved checkpoints instead: mergestream merge --method average"
        )
