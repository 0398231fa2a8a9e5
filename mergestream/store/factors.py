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
from mergestream.checkpoints import Checkpoint, SafetensorsWriter, TensorSpec, dtype_name, torch_dtype
from mergestream.digest import json_digest, tensor_digest
from mergestream.schema import BACKUP, Count, Number, damaged, invalid_file, validate
from mergestream.storage import Storage, read_json
from mergestream.store.step_storage import StepStorage
from mergestream.store.tensors import CheckedTensors

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.algebra.lowrank import FactorBounds, LowRank

INDEX = "factors.json"
SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")
_SHARED = f"steps share it, so that undo does not help: {BACKUP}, or add all experts to a new one"


def core_layout(bounds: FactorBounds, slot: str) -> dict[str, TensorSpec]:
    """The core of a slot, in float64: rounding it at every step would mix nearly equal singular values."""
    return {core_name(slot): TensorSpec("F64", bounds.core)} if all(bounds.core) else {}


def block_layout(bounds: FactorBounds, dtype: str, name: str) -> dict[str, TensorSpec]:
    sides = zip(SIDES, bounds.new, bounds.shape, strict=True)
    return {block_name(side, name): TensorSpec(dtype, (rows, length)) for side, rows, length in sides if rows}


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


class FactorReader:
    """The factored slots of one step."""

    def __init__(self, storage: Storage, folder: str, number: int, digests: Mapping[str, str], remedy: str) -> None:
        """``digests`` are those of all files of step ``number``."""
        self._where = f"{storage}/{folder}/{INDEX}"
        self.index: dict[str, FactoredSlot] = {}
        if INDEX in digests:
            content = read_json(storage, f"{folder}/{INDEX}")
            if json_digest(content) != digests[INDEX]:
                raise damaged(self._where, "it does not match its digest")
            self.index = validate(content, dict[str, FactoredSlot], self._where)
        self.files: dict[int, CheckedTensors] = {}
        self.names: set[str] = set()
        """All blocks in the files, by their names in ``digests``"""
        try:
            for step in used_steps(self.index):
                prefix = f"{file_prefix(step)}/"
                own = {name.removeprefix(prefix): digest for name, digest in digests.items() if name.startswith(prefix)}
                helps = remedy if step == number else _SHARED
                self.files[step] = CheckedTensors(storage, folder, file_prefix(step), own, helps)
                self.names |= {prefix + name for name in own}
        except BaseException:
            self.close()
            raise
        self._blocks: dict[tuple[str, int], Tensor] = {}
        self.origin: dict[int, list[int]] = {}
        """[step, rows] of every block that was read, by the id of its tensor"""

    def check(self, state: Checkpoint | None) -> None:
        """Refuse an index that does not fit the files, by their headers; ``state`` holds the cores."""
        for slot, entry in self.index.items():
            core = state.tensors.get(core_name(slot)) if state else None
            left, right = self.ranks(slot)
            if core is None:
                fits = not left or not right
            else:
                fits = core.dtype == "F64" and len(core.shape) == 2 and left <= core.shape[0] and right <= core.shape[1]
            for side, length in zip(SIDES, matrix_shape(entry["shape"]), strict=True):
                for step, rows in entry[side]:
                    block = self.files[step].tensors.get(block_name(side, slot.partition(":")[2]))
                    form = (block.dtype, *block.shape[1:]) if block else ()
                    fits = fits and block is not None and form == (entry["dtype"], length) and rows <= block.shape[0]
            if not fits:
                raise invalid_file(self._where, f"{slot} does not fit the factors")

    def ranks(self, slot: str) -> tuple[int, int]:
        """The ranks of the left and the right basis."""
        left, right = (sum(rows for _, rows in self.index[slot][side]) for side in SIDES)
        return left, right

    def read(self, slot: str, name: str, state: Checkpoint | None) -> LowRank:
        """A factored slot of the tensor ``name``; ``state`` holds its core."""
        import torch

        from mergestream.algebra.lowrank import Basis, LowRank

        entry = self.index[slot]
        shape, dtype = entry["shape"], torch_dtype(entry["dtype"])
        left, right = (
            Basis(length, dtype, tuple(self._block(block_name(side, name), *ref) for ref in entry[side]))
            for side, length in zip(SIDES, matrix_shape(shape), strict=True)
        )
        core = torch.zeros(left.rank, right.rank, dtype=torch.float64)
        if core.numel() and state is not None:
            core.copy_(state.read(core_name(slot))[: left.rank, : right.rank])
        return LowRank(torch.Size(shape), left, core, right)

    def _block(self, name: str, step: int, rows: int) -> Tensor:
        # The same tensor for every reader: a basis is known to extend another by the identity of its blocks.
        if (name, step) not in self._blocks:
            block = self._blocks.setdefault((name, step), self.files[step].read(name)[:rows])
            self.origin[id(block)] = [step, rows]
        return self._blocks[name, step]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_blocks": {}, "origin": {}}

    def close(self) -> None:
        for file in self.files.values():
            file.close()


class FactorWriter:
    """The blocks that a step adds, and the index of all that it uses."""

    def __init__(
        self, files: StepStorage, step: int, layout: Mapping[str, TensorSpec], before: FactorReader | None, resume: bool
    ) -> None:
        self._files, self._step, self._layout, self._before = files, step, layout, before
        self.writer: SafetensorsWriter | None = (
            files.open_writer(layout, file_prefix(step), resume=resume) if layout else None
        )
        self.resumed = self.writer.resumed if self.writer else resume

    def write(self, name: str, values: Mapping[str, LowRank]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Write the new blocks of the slots of a tensor; returns their entries in the index, and digests."""
        import torch

        index: dict[str, dict[str, Any]] = {
            slot: {"dtype": dtype_name(value.dtype), "shape": list(value.shape)} for slot, value in values.items()
        }
        digests: dict[str, str] = {}
        for side in SIDES:
            added: Tensor | None = None
            for slot, value in values.items():
                blocks = index[slot][side] = []
                for block in getattr(value, side).blocks:
                    origin = self._before.origin.get(id(block)) if self._before else None
                    if origin is None:
                        assert added is None or added is block, "a step adds one block to a basis"
                        added, origin = block, [self._step, block.shape[0]]
                    blocks.append(origin)
            block_key = block_name(side, name)
            if self.writer is None or block_key not in self._layout:
                assert added is None
                continue
            spec = self._layout[block_key]
            if added is None:  # nothing new: the block stays zero
                added = torch.zeros(0, spec.shape[1], dtype=torch_dtype(spec.dtype))
            padded = padded_to(added, spec.shape)
            self.writer.write(block_key, padded)
            digests[f"{file_prefix(self._step)}/{block_key}"] = tensor_digest(padded)
        return index, digests

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process writes blocks, and nothing else."""
        return {key: value for key, value in vars(self).items() if key != "_files"}

    def finish(self, used: Sequence[int]) -> None:
        """Close the new file; delete it if no slot uses it."""
        if self.writer:
            self.writer.close()
        if self._step not in used:
            self._files.drop(file_prefix(self._step))


def used_steps(index: Mapping[str, FactoredSlot]) -> list[int]:
    """The steps whose blocks an index uses."""
    return sorted({step for entry in index.values() for side in SIDES for step, _ in entry[side]})


def padded_to(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """The matrix, padded with zeros to a shape."""
    from torch.nn.functional import pad

    return pad(matrix, (0, shape[1] - matrix.shape[1], 0, shape[0] - matrix.shape[0]))
