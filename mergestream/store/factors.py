"""Factored slots on disk.

A slot that is kept as M = Lᵀ C R (mergestream/algebra/lowrank.py) has its core in the step's own file, rewritten at
every step like a dense slot. Its bases only grow: the blocks that a step adds lie in ``factors-NNNN``, and
the steps after it hold a link to that same file instead of a copy. ``factors.json`` says for every factored
slot which blocks make up its bases::

    {"sum:NAME": {"dtype": "F32", "shape": [m, n], "left": [[step, rows], …], "right": [[step, rows], …]}}

Files are laid out before the arithmetic, when only bounds of the ranks are known: a block may have fewer
``rows`` than its tensor, the core fewer rows and columns, and the rest is zero.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.algebra.bounds import FactorBounds, matrix_shape
from mergestream.checkpoints import Checkpoint, SafetensorsWriter, TensorSpec, dtype_name, open_checkpoint, torch_dtype
from mergestream.digest import tensor_digest
from mergestream.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank

INDEX = "factors.json"
SIDES = ("left", "right")


def core_layout(bounds: FactorBounds, slot: str) -> dict[str, TensorSpec]:
    """Cores are float64: rounding them at every step would be felt where singular values nearly coincide."""
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


def file_name(step: int) -> str:
    return f"{file_prefix(step)}.safetensors"


class FactorReader:
    """The factored slots of one step."""

    def __init__(self, directory: Path) -> None:
        path = directory / INDEX
        self.index: dict[str, dict[str, Any]] = read_json(path) if path.is_file() else {}
        self.files = {step: open_checkpoint(directory / file_name(step)) for step in used_steps(self.index)}
        self._blocks: dict[tuple[str, int], Tensor] = {}
        self.origin: dict[int, list[int]] = {}
        """[step, rows] of every block that was read here, by its identity"""

    def ranks(self, slot: str) -> tuple[int, int]:
        """Of the left and of the right basis."""
        left, right = (sum(rows for _, rows in self.index[slot][side]) for side in SIDES)
        return left, right

    def read(self, slot: str, name: str, state: Checkpoint | None) -> LowRank:
        """A factored slot of the tensor ``name``; ``state`` holds its core."""
        import torch

        from mergestream.algebra.lowrank import Basis, LowRank

        entry = self.index[slot]
        shape, dtype = tuple(entry["shape"]), torch_dtype(entry["dtype"])
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

    def tensors(self) -> Iterator[tuple[str, int, Checkpoint, str]]:
        """Every block in the files: its name in the digests, its bytes, the file and its name there."""
        for step, file in self.files.items():
            for name, info in file.tensors.items():
                yield f"{file_prefix(step)}/{name}", info.nbytes, file, name

    def close(self) -> None:
        for file in self.files.values():
            file.close()


class FactorWriter:
    """The blocks that a step adds, and the index of all that it uses."""

    def __init__(
        self, directory: Path, step: int, layout: Mapping[str, TensorSpec], before: FactorReader | None, resume: bool
    ) -> None:
        self._directory, self._step, self._layout, self._before = directory, step, layout, before
        self.writer: SafetensorsWriter | None = None
        if layout:
            prefix = file_prefix(step)
            self.writer = SafetensorsWriter(directory, layout, prefix=prefix, max_shard_size=2**62, resume=resume)
        self.resumed = self.writer.resumed if self.writer else resume

    def write(self, name: str, values: Mapping[str, LowRank]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Write what the slots of tensor ``name`` add; returns their entries in the index, and digests."""
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
            if added is None:  # what was laid out stays zeros, where nothing new has come
                added = torch.zeros(0, spec.shape[1], dtype=torch_dtype(spec.dtype))
            padded = padded_to(added, spec.shape)
            self.writer.write(block_key, padded)
            digests[f"{file_prefix(self._step)}/{block_key}"] = tensor_digest(padded)
        return index, digests

    def finish(self, previous: Path, used: Sequence[int]) -> None:
        """Close the new file, or drop it where nothing uses it, and take over those of earlier steps."""
        if self.writer:
            self.writer.close()
        if self._step not in used:
            (self._directory / file_name(self._step)).unlink(missing_ok=True)
        for step in used:
            if step != self._step:
                link(previous / file_name(step), self._directory / file_name(step))


def used_steps(index: Mapping[str, Mapping[str, Any]]) -> list[int]:
    return sorted({step for entry in index.values() for side in SIDES for step, _ in entry[side]})


def padded_to(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """The matrix in the upper left corner of zeros."""
    from torch.nn.functional import pad

    return pad(matrix, (0, shape[1] - matrix.shape[1], 0, shape[0] - matrix.shape[0]))


def link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
