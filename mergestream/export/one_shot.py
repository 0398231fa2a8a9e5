"""Merge several models that are all at hand, in one go."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mergestream.algebra.pieces import squared_norm
from mergestream.base.model import BaseModel
from mergestream.checkpoints import Checkpoint, open_checkpoint
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.digest import combined_digest
from mergestream.engine import LocalEngine
from mergestream.errors import MergestreamError
from mergestream.experts.opening import open_expert, task_vector
from mergestream.experts.vector import TaskVector
from mergestream.export.card import CardFacts, CardRow
from mergestream.export.directory import Output, remove_left_behind
from mergestream.export.model import export
from mergestream.merging.readout import cast
from mergestream.merging.step import Step, thresholds
from mergestream.methods.base import Context, Method
from mergestream.progress import Progress
from mergestream.store import Store
from mergestream.store.store import expert_name


def usual_workers(method: Method) -> int:
    """One where every file is read once, for the least processor time: sums wait for memory, and threads for the
    interpreter's lock. A second one saves a quarter of the wait, for up to a quarter more (docs/performance.md)."""
    return 1 if method.one_pass else os.cpu_count() or 1


def merge(
    base: str | Path,
    experts: Sequence[str | Path],
    out: str | Path,
    method: Method,
    *,
    linear: Sequence[str] = (),
    not_linear: Sequence[str] = (),
    partial: bool = False,
    ignore: Sequence[str] = (),
    allow_duplicate: bool = False,
    dtype: str | None = None,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    engine: LocalEngine | None = None,
    progress: Progress | None = None,
    command: str | None = None,
) -> None:
    """Merge ``experts`` in their order and write the result to ``out``.

    Where the method allows it, each tensor is carried through all models and written straight to the
    output, so that every file is read once; otherwise the models pass through a temporary store.
    """
    output = Output(Path(out), dtype, max_shard_size, overwrite)
    output.refuse_to_replace(base, *experts)
    engine, progress = engine or LocalEngine(usual_workers(method)), progress or Progress()
    if not method.one_pass:
        place = output.path.absolute().parent
        place.mkdir(parents=True, exist_ok=True)
        prefix = f".{output.path.name}.store-"
        remove_left_behind(place, prefix)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=place) as directory:
            store = Store.create(
                Path(directory) / "store",
                base,
                method,
                linear=linear,
                not_linear=not_linear,
                keep=0,
                engine=engine,
                progress=progress,
            )
            for expert in experts:
                store.add(expert, partial=partial, ignore=ignore, allow_duplicate=allow_duplicate)
            export(store, output, command=command)
        return
    with ExitStack() as stack:
        opened = stack.enter_context(open_checkpoint(base))
        model = BaseModel.examine(opened, linear=linear, not_linear=not_linear, measure=False)
        vectors = []
        for expert in experts:
            found = open_expert(expert)
            stack.callback(found.close)
            vectors.append(task_vector(model, opened, found, partial=partial, ignore=ignore))
        one_pass = OnePass(method, model, opened, vectors, engine)
        draft = stack.enter_context(output.draft())
        output.write_tensors(draft, model.tensors, one_pass.pieces, engine, progress)
        output.write_companions(draft, opened, one_pass.card(command, allow_duplicate))


@dataclass
class OnePass:
    """Carries each tensor through all task vectors at once."""

    method: Method
    model: BaseModel
    base: Checkpoint
    vectors: Sequence[TaskVector]
    engine: LocalEngine
    norm2: list[list[float]] = field(init=False)
    kept2: list[list[float]] = field(init=False)
    direction2: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.norm2 = [[] for _ in self.vectors]
        self.kept2 = [[] for _ in self.vectors]
        steps = [Step(self.method, t, vector, _no_state) for t, vector in enumerate(self.vectors, 1)]
        self.ranked = thresholds(steps, self.engine)
        # One-pass methods need no norm for their scale.
        self.scales = [self.method.readout_scale(step.t, math.nan, math.nan) for step in steps]

    def pieces(self, name: str, dtype: str) -> Iterator[tuple[int, Tensor]]:
        """The merged tensor, piece by piece."""
        name = self.model.tensors[name].tied_to or name
        tensor = self.model.tensors[name]
        if not tensor.merges:
            stored = self.base.read(name).reshape(-1)
            yield 0, cast(stored, dtype, name) if tensor.is_float else stored
            return
        base = self.vectors[0].base_pieces(name)
        linear = tensor.role == "linear"
        contexts = [Context(t, linear, found) for t, found in enumerate(self.ranked(name), 1)]
        for pieces in zip(*(vector.pieces(name, base=base) for vector in self.vectors), strict=True):
            kept2, direction = self.method.absorb_all([piece.delta for piece in pieces], contexts)
            for number, (piece, kept) in enumerate(zip(pieces, kept2, strict=True)):
                self.norm2[number].append(piece.norm2)
                self.kept2[number].append(piece.norm2 if kept is None else kept)
            self.direction2.append(squared_norm(direction))
            start = pieces[0].start
            yield start, cast(torch.add(base.at(start), direction, alpha=self.scales[-1], out=direction), dtype, name)

    def card(self, command: str | None, allow_duplicate: bool) -> CardFacts:
        rows: list[CardRow] = []
        for vector, norm2, kept2, scale in zip(self.vectors, self.norm2, self.kept2, self.scales, strict=True):
            total, kept = math.fsum(norm2), math.fsum(kept2)
            digest = combined_digest(vector.digests)
            same = "the base" if total == 0 else next((row.name for row in rows if row.digest == digest), None)
            if same is not None and not allow_duplicate:
                raise MergestreamError(
                    f"{vector.expert.source} is the same model as {same}; pass --allow-duplicate to merge it again"
                )
            name = expert_name(vector.expert.source, {row.name for row in rows})
            rows.append(
                CardRow(
                    name, digest, math.sqrt(total), kept / total if total else 1.0, 1 / scale if scale else math.inf
                )
            )
        distance = self.scales[-1] * math.sqrt(math.fsum(self.direction2))
        return CardFacts(self.base.source, self.method.name, self.method.parameters, rows, distance, command=command)


def _no_state(slot: str, name: str) -> Tensor:
    raise AssertionError("a one-pass method ranks task vectors only")
