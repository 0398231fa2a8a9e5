"""An average of a model's weights, kept up to date while it trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mergestream.errors import MergestreamError, UsageError
from mergestream.files import DRAFT_SUFFIX, write_error
from mergestream.merging.merger import Merger
from mergestream.methods.base import Method
from mergestream.methods.ema import EMA
from mergestream.progress import NoProgress
from mergestream.training.weights import tensors, trained, unwrapped

_ABOUT = "mergestream.averaging"


class Averaging:
    """Averages what training changes of a model, every few steps:

        averaging = Averaging(model, EMA(beta=0.99), every=10)
        for batch in batches:
            ...
            optimizer.step()
            averaging.step()
        with averaging.swap():
            evaluate(model)

    The average lives in RAM, in float32 at least; the base θ⁰ is the model at the first update.
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
        """``method`` is `EMA` (the default), `LAWA` or `Average` (SWA); the average is updated at those multiples of
        ``every`` that are at least ``start``."""
        if every < 1:
            raise UsageError(f"every={every} must be at least 1")
        self.model, self.method = unwrapped(model), method or EMA()
        if self.method.remembers_experts:
            raise UsageError(f"{self.method.name} remembers every model it sees; average by EMA, LAWA or Average")
        self.every, self.start, self._workers = every, start, workers
        self.steps = 0
        """Optimiser steps that have been counted"""
        self.merger: Merger | None = None
        """None before the first update"""
        self._swapped = False
        trained(self.model)  # refused now what could not be averaged later

    @property
    def updates(self) -> int:
        """How many models have gone into the average."""
        return len(self.merger.history) if self.merger else 0

    def step(self) -> bool:
        """Count an optimiser step, and update the average where it is time to; returns whether it was."""
        self.steps += 1
        due = self.steps >= self.start and self.steps % self.every == 0
        if due:
            self.update()
        return due

    def update(self) -> None:
        """Take the model as it is now into the average."""
        if self._swapped:
            raise UsageError("the model holds its average now; update it after `swap` has put the weights back")
        weights = trained(self.model)
        if self.merger is None:
            self.merger = Merger(_copied(weights), self.method, workers=self._workers, progress=NoProgress())
        elif changed := weights.keys() ^ set(self.merger.tensors):
            raise UsageError(
                f"{min(changed)} is trained now and was not at the first update, or the other way round; begin to "
                "average when it is settled what is trained (start=…)"
            )
        self.merger.add(weights)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights, in the model's types, by the model's names; what is not trained is not in it."""
        if self.merger is None:
            raise UsageError("nothing has been averaged yet")
        return self.merger.state_dict()

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Have the model hold its average; whatever happens within, the weights are put back.

        Before the first update there is no average, and the model stays what it is.
        """
        if self.merger is None or self._swapped:
            yield
            return
        averaged, everything = self.merger.state_dict(), tensors(self.model)
        weights = {name: everything[name] for name in averaged}
        kept = _copied(weights)
        self._swapped = True
        try:
            _put(averaged, weights)
            yield
        finally:
            _put(kept, weights)
            self._swapped = False

    def save(self, path: str | Path) -> None:
        """Keep all that is needed to go on in one file; `load` takes it back."""
        path = Path(path)
        remembered = self.merger.remembered() if self.merger else {}
        beside = path.with_name(path.name + DRAFT_SUFFIX)
        try:
            save_file(remembered, beside, metadata={_ABOUT: json.dumps({"steps": self.steps, **self._made_by})})
            beside.replace(path)
        except (OSError, SafetensorError) as error:
            beside.unlink(missing_ok=True)
            raise write_error(path, error if isinstance(error, OSError) else OSError(0, str(error))) from error

    def load(self, path: str | Path) -> None:
        """Go on where `save` was called, with the same model and method."""
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get(_ABOUT, "{}"))
                remembered = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            steps, made_by = about.pop("steps"), about
        except (OSError, SafetensorError) as error:
            raise MergestreamError(f"{path} cannot be read: {error}") from error
        except (ValueError, KeyError, AttributeError):
            raise MergestreamError(f"{path} was not written by Averaging.save") from None
        if made_by != self._made_by:
            raise UsageError(f"{path} holds an average by {made_by}, and this one is by {self._made_by}")
        self.merger, self.steps = self._recalled(remembered, path) if remembered else None, steps

    @property
    def _made_by(self) -> dict[str, object]:
        return {"method": self.method.name, "parameters": self.method.parameters}

    def _recalled(self, remembered: dict[str, Tensor], path: str | Path) -> Merger:
        weights = trained(self.model)
        try:
            merger = Merger.recall(remembered, self.method, workers=self._workers)
        except (KeyError, ValueError, TypeError) as error:
            raise MergestreamError(f"{path} does not hold what it should: {error}") from None
        ours, theirs = ({name: t.shape for name, t in found.items()} for found in (weights, merger.tensors))
        if differing := [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]:
            raise MergestreamError(f"{path} is of another model: they differ in tensor {min(differing)}")
        return merger


def _copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in weights.items()}


@torch.no_grad()
def _put(values: dict[str, Tensor], into: dict[str, Tensor]) -> None:
    """In place: optimisers, compiled graphs and tied names know the memory, not only the tensors."""
    for name, tensor in into.items():
        tensor.copy_(values[name])
