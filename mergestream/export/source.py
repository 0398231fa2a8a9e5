"""Sources of merged tensors: a store, or experts that are merged in one pass; with or without new tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mergestream.base.model import BaseModel
from mergestream.checkpoints import Checkpoint, TensorSpec, torch_dtype
from mergestream.checkpoints.tokenizer import add_tokens, read_tokenizer
from mergestream.errors import MergestreamError
from mergestream.experts.vocabulary import ROWS, Token, rows_of, with_rows
from mergestream.merging.one_pass import OnePassMerge
from mergestream.merging.reading import Reading, cast
from mergestream.progress import Progress
from mergestream.schema import invalid_file
from mergestream.sizes import shorten_list
from mergestream.store.records import Task
from mergestream.store.snapshot import Snapshot


@dataclass(frozen=True)
class StateSource:
    """Reads tensors out of a store: θ⁰ + scale · direction.

    With a ``task`` it has the head of that expert, and the tensor names of the expert's class.
    """

    reading: Reading
    base: Checkpoint
    scale: float
    task: Task | None = None

    @property
    def model(self) -> BaseModel:
        return self.reading.model

    @cached_property
    def _heads(self) -> dict[str, TensorSpec]:
        kept = self.task.heads.tensors if self.task else {}
        return {name: spec for name, spec in kept.items() if not name.startswith(ROWS)}

    @cached_property
    def names(self) -> dict[str, str]:
        """Every tensor by the name it is written under, with its name in the base or the expert."""
        tensors = self.model.tensors
        if self.task is None:
            return {name: name for name in tensors}
        # The task's class has no place for a head of the base, and for tensors that it does not have.
        absent = {name for name in tensors if tensors[name].role == "head"} - self._heads.keys()
        placed = [name for name in tensors if name not in absent.union(self.task.absent)]
        names = {self.task.prefix.name_in_task(name): name for name in placed}
        return {**names, **{name: name for name in self._heads if name not in tensors}}

    @cached_property
    def layout(self) -> dict[str, TensorSpec]:
        """Every tensor that is written, in the base's dtype."""
        tensors = {**self.model.tensors, **self._heads}
        return {written: tensors[name] for written, name in self.names.items()}

    @property
    def memory(self) -> Mapping[str, int]:
        """Peak bytes per tensor."""
        memory, tensors, copies = self.reading.memory, self.model.tensors, self.base.copies
        known = {written: name for written, name in self.names.items() if name in memory}
        return {written: memory[name] + copies * tensors[name].nbytes for written, name in known.items()}

    def pieces(self, name: str, dtype: str) -> Iterator[tuple[int, Tensor]]:
        """Consecutive pieces of a tensor, each with its first element, rounded once to ``dtype``."""
        name = self.names[name]
        if self.task and name in self._heads:
            return iter([(0, cast(self.task.heads.read(name).reshape(-1), dtype, name))])
        stored = self.model.tensors[name].tied_to or name
        return self.reading.pieces(stored, self.base, self.scale, dtype)

    @property
    def norm2(self) -> Mapping[str, float]:
        """‖direction‖² of the tensors that were read."""
        return self.reading.norm2


Source = StateSource | OnePassMerge


class ExpertTokens(NamedTuple):
    """The tokens that one expert adds, the checkpoint with their rows, and the expert's weight."""

    tokens: Sequence[Token]
    kept: Checkpoint
    weight: float = 1.0


@dataclass(frozen=True)
class VocabularySource:
    """A source whose embedding tables also have the tokens of experts.

    New rows are in the order of the experts; the row of a token of several experts is their mean.
    """

    source: Source
    experts: Mapping[str, ExpertTokens]
    """By name, in the order in which they were added"""

    @cached_property
    def tokens(self) -> dict[str, Token]:
        """The new tokens by their text, each as its first expert has it."""
        tokens: dict[str, Token] = {}
        for expert in self.experts.values():
            for token in expert.tokens:
                tokens.setdefault(token.content, token)
        return tokens

    def new_ids(self, expert: str) -> dict[int, int]:
        """The rows of the tokens that an expert adds, by their ids in that expert."""
        tokens = self.experts[expert].tokens if expert in self.experts else ()
        return {token.id: self.rows[token.content] for token in tokens}

    @cached_property
    def tables(self) -> dict[str, str]:
        """Every tensor with a row per token, with the name that its new rows are kept under."""
        ties, layout = self.source.model.ties, self.source.layout
        kept = {key for expert in self.experts.values() for key in expert.kept.tensors}
        found = {name: f"{ROWS}{ties.get(stored, stored)}" for name, stored in self.source.names.items()}
        tables = {name: key for name, key in found.items() if key in kept}
        for tokens, rows, _ in self.experts.values():
            for name, key in tables.items():
                width = layout[name].numel // max(rows_of(layout[name].shape), 1)
                if key in rows.tensors and rows.tensors[key].shape != (len(tokens), width):
                    raise invalid_file(Path(rows.source), f"{key} is not as wide as {name} of the base")
        if not tables:
            raise invalid_file(Path(next(iter(self.experts.values())).kept.source), "it has no rows for its tokens")
        return tables

    @cached_property
    def base_size(self) -> int:
        """The number of rows in the base."""
        return rows_of(self.source.layout[next(iter(self.tables))].shape)

    @cached_property
    def size(self) -> int:
        """The number of rows that are written."""
        return max(self.base_size, max(self.rows.values()) + 1)

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of every new token: after the base's last token, or after its last row if the token has no name."""
        end = self.base_size
        named = [content for content, token in self.tokens.items() if token.added is not None]
        if named:
            base = self.source.base
            tokenizer = read_tokenizer(base.directory)
            if tokenizer is None or not tokenizer.ids.keys().isdisjoint(named):
                raise MergestreamError(
                    f"{base.source}: the tokenizer of the base has changed since {named[0]} was added; restore it"
                )
            end = tokenizer.end
        rows = {content: end + number for number, content in enumerate(named)}
        first = max(self.base_size, end + len(named))
        nameless = [content for content in self.tokens if content not in rows]
        return rows | {content: first + number for number, content in enumerate(nameless)}

    @cached_property
    def layout(self) -> dict[str, TensorSpec]:
        """Every tensor that is written, in the base's dtype."""
        layout = dict(self.source.layout)
        for name in self.tables:
            layout[name] = TensorSpec(layout[name].dtype, with_rows(layout[name].shape, self.size))
        return layout

    @property
    def memory(self) -> Mapping[str, int]:
        """Peak bytes per tensor: also the whole table, and the new rows in float64 twice."""
        memory = dict(self.source.memory)
        for name in self.tables:
            table = self.layout[name]
            memory[name] = memory.get(name, 0) + 8 * table.numel + 16 * len(self.rows) * table.numel // self.size
        return memory

    def pieces(self, name: str, dtype: str) -> Iterator[tuple[int, Tensor]]:
        """Consecutive pieces of a tensor; a table is one piece."""
        if name not in self.tables:
            yield from self.source.pieces(name, dtype)
            return
        numel = self.layout[name].numel
        table = torch.zeros(numel, dtype=torch_dtype(dtype))
        for start, piece in self.source.pieces(name, dtype):
            table[start : start + piece.numel()] = piece
        width = numel // self.size
        table.view(-1, width)[list(self.rows.values())] = cast(self._new_rows(self.tables[name], width), dtype, name)
        yield 0, table

    def _new_rows(self, key: str, width: int) -> Tensor:
        """The weighted mean of the experts that have each token."""
        order = {content: number for number, content in enumerate(self.rows)}
        total = torch.zeros(len(order), width, dtype=torch.float64)
        weights = torch.zeros(len(order), 1, dtype=torch.float64)
        for tokens, kept, weight in self.experts.values():
            if key in kept.tensors:
                places = [order[token.content] for token in tokens]
                total[places] += weight * kept.read(key).reshape(len(tokens), width).double()
                weights[places] += weight
        return total / weights.where(weights > 0, 1.0)

    def extend_tokenizer(self, directory: Path) -> None:
        """Add the tokens that have a name to the tokenizer's files."""
        found = {content: (row, self.tokens[content].added) for content, row in self.rows.items()}
        named = {content: (row, added) for content, (row, added) in found.items() if added is not None}
        if named:
            add_tokens(directory, named)


def select_tokens(
    snapshot: Snapshot, reading: Reading, task: str | None, stack: ExitStack, progress: Progress
) -> dict[str, ExpertTokens]:
    """The experts whose tokens go into the model, by name.

    These are the task's expert, selected experts that were added with ``--vocab grow``, and an expert that is read out
    alone. ``stack`` closes their files.
    """
    every_expert = dict.fromkeys(snapshot.manifest.names, 1.0)
    weights = {name: weight for name, weight in (reading.weights or every_expert).items() if weight}
    is_alone = reading.readout.name == "expert"
    experts: dict[str, ExpertTokens] = {}
    left_out: list[str] = []
    for entry in snapshot.manifest.history:
        tokens = snapshot.records[entry.name].tokens
        if not tokens or (entry.name not in weights and entry.name != task):
            continue
        if entry.name == task or is_alone or entry.options.get("vocab") == "grow":
            kept = stack.enter_context(snapshot.open_task(entry.name).heads)
            experts[entry.name] = ExpertTokens(tokens, kept, weights.get(entry.name, 1.0))
        else:
            left_out.append(entry.name)
    if left_out:
        names = shorten_list(left_out)
        progress.note(f"the model leaves out the tokens of {names}; --task {left_out[0]} adds that expert's")
    return experts
