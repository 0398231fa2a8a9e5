"""The task vector of an adapter: s·B·A in factors, and what was saved whole as a difference from the base."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from mergestream.algebra.lowrank import LowRank, squared_norm
from mergestream.algebra.pieces import Elements, ranges
from mergestream.base.model import BaseModel
from mergestream.checkpoints import Checkpoint, TensorInfo
from mergestream.digest import tensor_digest, text_digest
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.reading import Adapter, BoundAdapter
from mergestream.experts.vector import BasePieces, TaskVector
from mergestream.experts.vocabulary import Vocab

if TYPE_CHECKING:
    from torch import Tensor


class AdaptedTensors(Checkpoint):
    """What an adapter has for the tensors of its base, under their names, as if it were a checkpoint."""

    def __init__(self, adapter: BoundAdapter) -> None:
        self.adapter = adapter
        self.source = adapter.adapter.source
        self.directory = adapter.adapter.directory
        self.fingerprint = adapter.adapter.fingerprint
        file = Path(adapter.adapter.file).name
        stored = adapter.adapter.weights.tensors
        self._keys = {**adapter.whole, **{name: adapter.adapter.whole[name] for name in adapter.extra}}
        tensors = {name: TensorInfo("F32", adapter.tensors[name].shape, file) for name in adapter.terms}
        self.tensors = MappingProxyType({**tensors, **{name: stored[key] for name, key in self._keys.items()}})

    def read(self, name: str) -> Tensor:
        """A tensor that was saved whole."""
        return self.adapter.finite(self._keys[name])

    def close(self) -> None:
        self.adapter.adapter.close()


class AdapterVector(TaskVector):
    """The difference that an adapter makes to the base."""

    def __init__(
        self,
        model: BaseModel,
        base: Checkpoint,
        adapter: Adapter,
        *,
        ignore: Sequence[str] = (),
        vocab: Vocab | None = None,
    ) -> None:
        self.adapter = adapter.bind(
            {name: tensor for name, tensor in model.tensors.items() if not tensor.tied_to},
            {**model.spellings, **model.ties},
            model.conv1d,
        )
        adapted, prefix = AdaptedTensors(self.adapter), self.adapter.prefix
        super().__init__(model, base, adapted, partial=True, ignore=ignore, prefix=prefix, vocab=vocab)
        self.adapter_config = adapter.config.inherited

    @property
    def renaming(self) -> None:
        """The names of adapters are those that PEFT gives: nobody wonders."""

    @property
    def in_factors(self) -> Collection[str]:
        return self.adapter.terms

    @property
    def inputs(self) -> tuple[Checkpoint, ...]:
        return (self.adapter.adapter.weights,)

    def rank(self, name: str) -> int | None:
        if name in self.adapter.whole and self._reads(name):
            return None
        return self.adapter.rank(name) if self._reads(name) else 0

    def factors(self, name: str) -> LowRank:
        delta = LowRank.zeros(self.model.tensors[name].shape, self.dtype(name))
        if self._reads(name):
            self._check_copy(name)
            self.digests[name] = self._digest(name)
            delta = self.adapter.delta(name, self.dtype(name))
        self.norm2[name] = squared_norm(delta)
        return delta

    def elements(self, name: str, base: Elements | None = None) -> Elements:
        return self.factors(name).elements() if self._in_factors(name) else super().elements(name, base)

    def _differences(self, name: str, shared: BasePieces | None) -> Iterator[tuple[int, Tensor]]:
        if not self._in_factors(name):
            yield from super()._differences(name, shared)
            return
        elements = self.factors(name).elements()
        for start, stop in ranges(self.model.tensors[name].numel):
            yield start, elements(start, stop)

    def _unusable(self, name: str) -> MergestreamError:
        return self.adapter.too_large(name) if self._in_factors(name) else super()._unusable(name)

    def _in_factors(self, name: str) -> bool:
        return self._reads(name) and name in self.adapter.terms

    def _digest(self, name: str) -> str:
        """Of the factors as they are stored, and of what makes a task vector of them."""
        weights = self.adapter.adapter.weights
        lines = [
            f"{term.scaling} {term.transposed} {tensor_digest(weights.read(term.factors.names[factor]))}"
            for term in self.adapter.terms[name]
            for factor in "AB"
        ]
        return text_digest("\n".join(lines))

    def _check_copy(self, name: str) -> None:
        """PEFT saves an embedding along with its factors: it must be the base's own."""
        import torch

        key = self.adapter.copies.get(name)
        if key is None or not self.base.has_weights:
            return
        ours, theirs = self.base.read(name), self.adapter.adapter.weights.read(key)
        if not torch.equal(theirs.to(ours.dtype), ours):
            raise MergestreamError(
                f"{self.adapter.adapter.file}: {key} is not {name} of the base: the adapter was made for another model"
            )
