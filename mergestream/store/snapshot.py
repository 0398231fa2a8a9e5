"""A store as it is after some step: the manifest and the state that belong together, open for reading."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints import Checkpoint, open_checkpoint
from mergestream.errors import MergestreamError
from mergestream.store.manifest import Expert, Manifest
from mergestream.store.records import HEADS, read_record, record_directory
from mergestream.store.steps import StepReader

if TYPE_CHECKING:
    from mergestream.engine import Engine
    from mergestream.merging.readout import Readout
    from mergestream.methods.base import Method


@dataclass(frozen=True)
class Snapshot:
    """The state after the last model of a history; its files stay readable while it is open, even if pruned."""

    path: Path
    manifest: Manifest
    """Its history ends with the step whose state this is."""
    state: StepReader

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.state.close()

    @property
    def last(self) -> Expert:
        return self.manifest.history[-1]

    @cached_property
    def method(self) -> Method:
        return self.manifest.make_method()

    def readout(self, engine: Engine) -> Readout:
        from mergestream.merging.readout import Readout

        factored = {name for name in self.manifest.base.merged if self.ranks(name) is not None}
        return Readout(self.manifest.base, self.method, self.manifest.step, self.state.read, engine.device, factored)

    def slots(self, name: str) -> list[str]:
        """The slots of a tensor's state."""
        from mergestream.merging.step import tensor_context

        return list(self.method.layout(tensor_context(self.manifest.base.tensors[name], self.manifest.step)))

    def ranks(self, name: str) -> list[tuple[int, int]] | None:
        """The ranks of the left and the right basis of every slot of a tensor; None where they are dense."""
        return self.state.ranks(self.slots(name), name)

    def rank_bound(self, name: str) -> int | None:
        """A bound of the rank of a tensor's direction; None where its state is dense."""
        ranks = self.ranks(name)
        return None if ranks is None else min(sum(left for left, _ in ranks), sum(right for _, right in ranks))

    def is_zero(self, name: str) -> bool:
        """Whether nothing but zeros has been absorbed."""
        return not any(self.state.read(slot, name).any() for slot in self.slots(name))

    def open_heads(self, name: str) -> Checkpoint:
        """The tensors that were kept for one expert."""
        path = record_directory(self.path, self.manifest.number(name)) / HEADS
        if not path.is_file():
            raise MergestreamError(f"expert {name} has no head of its own; --heads GLOB at init keeps them")
        return open_checkpoint(path)

    def head_config(self, name: str) -> dict[str, Any] | None:
        """The config of an expert with a head of its own, for the labels are in it; None where it had none."""
        return read_record(record_directory(self.path, self.manifest.number(name)))["config"]
