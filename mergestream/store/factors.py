"""Reading and writing factored slots.

A slot that is kept as M = Lᵀ C R (mergestream/algebra/lowrank.py) has its core in the step's own file, rewritten at
every step like a dense slot. Its bases only grow: a step writes its new blocks to ``factors-NNNN``, and later steps
hold a link to that file instead of a copy. ``factors.json`` lists the blocks of every factored slot's bases::

    {"sum:NAME": {"dtype": "F32", "shape": [m, n], "left": [[step, rows], …], "right": [[step, rows], …]}}

Files are laid out before the arithmetic, when only bounds of the ranks are known. A block may have fewer ``rows`` than
its tensor, and the core fewer rows and columns; the rest is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from mergestream.algebra.pieces import matrix_shape
from mergestream.checkpoints import dtype_name, torch_dtype
from mergestream.digest import json_digest
from mergestream.schema import Count, Number, damaged, invalid_file, validate
from mergestream.storage import Storage, read_json
from mergestream.store.tensors import CheckedTensors

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank

INDEX, STEM = "factors.json", "model"
"""The index, and the beginning of the name of the file with dense slots and cores"""
SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")


def core_name(slot: str) -> str:
    return f"{slot}:core"


def block_name(side: str, name: str) -> str:
    return f"{side}:{name}"


def file_prefix(step: int) -> str:
    return f"factors-{step:04d}"


class FactoredSlot(TypedDict):
    """An entry of the index."""

    dtype: Literal["F32", "F64"]
    shape: tuple[Count, ...]
    left: list[tuple[Number, Count]]
    right: list[tuple[Number, Count]]


def read_index(storage: Storage, folder: str, digests: Mapping[str, str]) -> dict[str, FactoredSlot]:
    """The factored slots of a step, by the digests of its files; empty where all are dense."""
    if INDEX not in digests:
        return {}
    where, content = f"{storage}/{folder}/{INDEX}", read_json(storage, f"{folder}/{INDEX}")
    if json_digest(content) != digests[INDEX]:
        raise damaged(where, "it does not match its digest")
    return validate(content, dict[str, FactoredSlot], where)


class FactorReader:
    """The factored slots of one step."""

    def __init__(self, index: Mapping[str, FactoredSlot], files: Mapping[str, CheckedTensors], where: str) -> None:
        """``files`` are those of the step, by the beginning of their names; ``where`` is the step's folder."""
        self.index, self._files = index, files
        self._blocks: dict[tuple[str, int], Tensor] = {}
        self.origin: dict[int, list[int]] = {}
        """[step, rows] of every block that was read, by the id of its tensor"""
        for slot in index:
            if not self._fits(slot):
                raise invalid_file(f"{where}/{INDEX}", f"{slot} does not fit the factors")

    def _fits(self, slot: str) -> bool:
        """Whether the files have the blocks and the core that the index says, by their headers."""
        entry, core, (left, right) = self.index[slot], self._files[STEM].tensors.get(core_name(slot)), self.ranks(slot)
        for side, length in zip(SIDES, matrix_shape(entry["shape"]), strict=True):
            for step, rows in entry[side]:
                block = self._files[file_prefix(step)].tensors.get(block_name(side, slot.partition(":")[2]))
                if not block or (block.dtype, *block.shape[1:]) != (entry["dtype"], length) or rows > block.shape[0]:
                    return False
        if core is None:
            return not left or not right
        return core.dtype == "F64" and len(core.shape) == 2 and left <= core.shape[0] and right <= core.shape[1]

    def ranks(self, slot: str) -> tuple[int, int]:
        """The ranks of the left and the right basis."""
        left, right = (sum(rows for _, rows in self.index[slot][side]) for side in SIDES)
        return left, right

    def read(self, slot: str, name: str) -> LowRank:
        """A factored slot of the tensor ``name``."""
        import torch

        from mergestream.algebra.lowrank import Basis, LowRank

        entry = self.index[slot]
        shape, dtype = entry["shape"], torch_dtype(entry["dtype"])
        left, right = (
            Basis(length, dtype, tuple(self._block(block_name(side, name), *ref) for ref in entry[side]))
            for side, length in zip(SIDES, matrix_shape(shape), strict=True)
        )
        core = torch.zeros(left.rank, right.rank, dtype=torch.float64)
        if core.numel():
            core.copy_(self._files[STEM].read(core_name(slot))[: left.rank, : right.rank])
        return LowRank(torch.Size(shape), left, core, right)

    def _block(self, name: str, step: int, rows: int) -> Tensor:
        # The same tensor for every reader: a basis is known to extend another by the identity of its blocks.
        if (name, step) not in self._blocks:
            block = self._blocks.setdefault((name, step), self._files[file_prefix(step)].read(name)[:rows])
            self.origin[id(block)] = [step, rows]
        return self._blocks[name, step]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_blocks": {}, "origin": {}}


def describe_slots(
    name: str, values: Mapping[str, LowRank], step: int, before: FactorReader | None
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """The entries of a tensor's slots in the index, and the blocks that the step adds, by name; ``before`` has read the
    other blocks."""
    import torch

    index: dict[str, dict[str, Any]] = {
        slot: {"dtype": dtype_name(value.dtype), "shape": list(value.shape)} for slot, value in values.items()
    }
    added: dict[str, Tensor] = {}
    for side in SIDES:
        key = block_name(side, name)
        for slot, value in values.items():
            basis, blocks = getattr(value, side), []
            for block in basis.blocks:
                origin = before.origin.get(id(block)) if before else None
                if origin is None:
                    assert added.setdefault(key, block) is block, "a step adds one block to a basis"
                    origin = [step, block.shape[0]]
                blocks.append(origin)
            index[slot][side] = blocks
        added.setdefault(key, torch.zeros(0, basis.length, dtype=basis.dtype))  # nothing new
    return index, added


def used_steps(index: Mapping[str, FactoredSlot]) -> list[int]:
    """The steps whose blocks an index uses."""
    return sorted({step for entry in index.values() for side in SIDES for step, _ in entry[side]})


def padded_to(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """The matrix, padded with zeros to a shape."""
    padded = matrix.new_zeros(*shape)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded
