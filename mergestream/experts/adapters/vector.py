"""The task vector of an adapter: s·B·A in factors, and the difference of tensors that were saved in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mergestream.algebra.lowrank import LowRank, squared_norm
from mergestream.algebra.pieces import Elements, ranges
from mergestream.base.model import BaseModel
from mergestream.checkpoints import Checkpoint, torch_dtype
from mergestream.digest import tensor_digest, text_digest
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.adapter import Adapter, BoundAdapter
from mergestream.experts.vector import BasePieces, TaskVector
from mergestream.experts.vocabulary import Vocab

if TYPE_CHECKING:
    from torch import Tensor


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
        self.adapter = BoundAdapter(adapter, model, base)
        terms = self.adapter.terms
        super().__init__(model, base, self.adapter, partial=True, ignore=ignore, vocab=vocab, in_factors=terms)
        self.prefix, self.notes = self.adapter.prefix, adapter.notes + self.notes
        self.adapter_config = adapter.config.inherited
        self._in_factors = {name for name in terms if self.actions[name] == "merged"}

    def rank(self, name: str) -> int | None:
        if self.actions[name] != "merged":
            return 0
        return self.adapter.rank(name) if name in self._in_factors else None

    def factors(self, name: str) -> LowRank:
        tensor = self.model.tensors[name]
        dtype = torch_dtype(tensor.state_dtype)
        delta = LowRank.zeros(tensor.shape, dtype)
        if name in self._in_factors:
            self._check_copy(name)
            self.digests[name] = self._digest(name)
            delta = self.adapter.delta(name, dtype)
        self.norm2[name] = squared_norm(delta)
        return delta

    def elements(self, name: str, base: Elements | None = None) -> Elements:
        return self.factors(name).elements() if name in self._in_factors else super().elements(name, base)

    def pieces(self, name: str, base: BasePieces | None = None) -> Iterator[tuple[int, Tensor]]:
        if name not in self._in_factors:
            yield from super().pieces(name, base)
            return
        elements = self.factors(name).elements()
        for start, stop in ranges(self.model.tensors[name].numel):
            yield start, elements(start, stop)

    def _digest(self, name: str) -> str:
        """Digest of the stored factors, their scaling and their orientation."""
        read = self.adapter.weights.read
        lines = [
            f"{term.scaling} {term.transposed} {tensor_digest(read(key))}"
            for term in self.adapter.terms[name]
            for key in (term.factors.a, term.factors.b)
        ]
        return text_digest("\n".join(lines))

    def _check_copy(self, name: str) -> None:
        """Check that an embedding that PEFT saved beside its factors is the base's own."""
        import torch

        key = self.adapter.unchanged.get(name)
        if key is None or not self.base.has_weights:
            return
        ours, theirs = self.base.read(name), self.adapter.weights.read(key)
        if not torch.equal(theirs.to(ours.dtype), ours):
            raise MergestreamError(
                f"{self.adapter.weights.source}: {key} is not {name} of the base: the adapter was made for another "
                "model"
            )
