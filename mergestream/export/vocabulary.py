"""Tokens that experts have added: their rows in the tables of a merged model, its tokenizer and its config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mergestream.checkpoints import Checkpoint, TensorSpec, torch_dtype
from mergestream.checkpoints.tokenizer import add_tokens, read_tokenizer
from mergestream.errors import MergestreamError
from mergestream.experts.vocabulary import ROWS, Token, rows_of, with_rows
from mergestream.export.source import Source
from mergestream.merging.entries import EntriesReading
from mergestream.merging.reading import Reading, cast
from mergestream.progress import Progress
from mergestream.schema import invalid_file
from mergestream.sizes import shorten_list
from mergestream.store.snapshot import Snapshot


class Speaker(NamedTuple):
    """An expert whose tokens go into the model: the tokens, the rows that were kept of them, and its weight."""

    tokens: Sequence[Token]
    kept: Checkpoint
    weight: float = 1.0


@dataclass(frozen=True)
class GrownSource:
    """A merged model with the tokens of experts, in the order of arrival; of what several have added, their mean."""

    source: Source
    speakers: Sequence[Speaker]
    base: Checkpoint

    @cached_property
    def tokens(self) -> dict[str, Token]:
        """In the order of arrival; of what several have, as the first has it"""
        tokens: dict[str, Token] = {}
        for speaker in self.speakers:
            for token in speaker.tokens:
                tokens.setdefault(token.content, token)
        return tokens

    @cached_property
    def tables(self) -> dict[str, str]:
        """Every tensor with a row for each token, and the name under which the new rows were kept."""
        ties = self.source.model.ties
        kept = {key for speaker in self.speakers for key in speaker.kept.tensors if key.startswith(ROWS)}
        names = {name: self.source.original(name) for name in self.source.forms}
        found = {name: f"{ROWS}{ties.get(original, original)}" for name, original in names.items()}
        tables = {name: key for name, key in found.items() if key in kept}
        for tokens, rows, _ in self.speakers:
            for name, key in tables.items():
                form = self.source.forms[name]
                width = form.numel // max(rows_of(form.shape), 1)
                if key in rows.tensors and rows.tensors[key].shape != (len(tokens), width):
                    raise invalid_file(Path(rows.source), f"{key} is not as wide as {name} of the base")
        if not tables:
            raise invalid_file(Path(self.speakers[0].kept.source), "it has no rows for the tokens that it is for")
        return tables

    @cached_property
    def size(self) -> int:
        """How many rows the base has."""
        return rows_of(self.source.forms[next(iter(self.tables))].shape)

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of every new token: after the last token of the base, or after its last row where none tells."""
        end = self.size
        named = [content for content, token in self.tokens.items() if token.added is not None]
        if named:
            tokenizer = read_tokenizer(self.base.directory)
            if tokenizer is None or not tokenizer.ids.keys().isdisjoint(named):
                raise MergestreamError(
                    f"the tokenizer of the base {self.base.source} is not the one that {named[0]} was to be added to; "
                    "restore it"
                )
            end = tokenizer.end
        rows = {content: end + number for number, content in enumerate(named)}
        nameless = [content for content in self.tokens if content not in rows]
        return rows | {content: max(self.size, end + len(named)) + number for number, content in enumerate(nameless)}

    @property
    def forms(self) -> Mapping[str, TensorSpec]:
        forms = dict(self.source.forms)
        for name in self.tables:
            size = max(self.size, max(self.rows.values()) + 1)
            forms[name] = TensorSpec(forms[name].dtype, with_rows(forms[name].shape, size))
        return forms

    @property
    def memory(self) -> Mapping[str, int]:
        """With the rows after the base's last token, and the new ones in float64 twice."""
        memory, forms = dict(self.source.memory), self.forms
        for name in self.tables:
            size = rows_of(forms[name].shape)
            width, tail = forms[name].numel // size, size - min(self.rows.values())
            memory[name] = memory.get(name, 0) + 8 * width * (tail + 2 * len(self.rows))
        return memory

    def pieces(self, name: str, dtype: str) -> Iterator[tuple[int, Tensor]]:
        if name not in self.tables:
            yield from self.source.pieces(name, dtype)
            return
        form = self.forms[name]
        width = form.numel // rows_of(form.shape)
        edge = min(self.rows.values()) * width
        tail = torch.zeros(form.numel - edge, dtype=torch_dtype(dtype))
        for start, piece in self.source.pieces(name, dtype):
            before = min(max(edge - start, 0), piece.numel())
            if before:
                yield start, piece[:before]
            behind = max(start - edge, 0)
            tail[behind : behind + piece.numel() - before] = piece[before:]
        places = torch.tensor(list(self.rows.values())) - edge // width
        tail.view(-1, width)[places] = cast(self._new_rows(self.tables[name], width), dtype, name)
        yield edge, tail

    def _new_rows(self, key: str, width: int) -> Tensor:
        """The mean of all that have a token, by their weights."""
        order = {content: number for number, content in enumerate(self.rows)}
        total, weights = torch.zeros(len(order), width, dtype=torch.float64), torch.zeros(len(order), 1).double()
        for tokens, kept, weight in self.speakers:
            if key in kept.tensors:
                places = [order[token.content] for token in tokens]
                total[places] += weight * kept.read(key).reshape(len(tokens), width).double()
                weights[places] += weight
        return total / weights.where(weights > 0, torch.ones(()).double())

    def extend_tokenizer(self, directory: Path) -> None:
        """Add the tokens that have a name to the tokenizer's files."""
        named = {
            content: (row, token.added)
            for content, row in self.rows.items()
            if (token := self.tokens[content]).added is not None
        }
        if named:
            add_tokens(directory, named)


def spoken(
    snapshot: Snapshot, reading: Reading, task: str | None, stack: ExitStack, progress: Progress
) -> dict[str, Speaker]:
    """The experts whose tokens a model has, by name: those that are read out and were added to grow it, the only one
    that is read out, and the one whose task it is."""
    weights = dict.fromkeys(snapshot.manifest.names, 1.0)
    alone = False
    if isinstance(reading, EntriesReading):
        weights = {expert.name: expert.weight for expert in reading.experts if expert.weight}
        alone = reading.readout.name == "expert"
    speakers: dict[str, Speaker] = {}
    silent: list[str] = []
    for entry in snapshot.manifest.history:
        tokens = snapshot.tokens(entry)
        if not tokens or (entry.name not in weights and entry.name != task):
            continue
        if entry.name == task or alone or entry.options.get("vocab") == "grow":
            kept = stack.enter_context(snapshot.open_task(entry.name).heads)
            speakers[entry.name] = Speaker(tokens, kept, weights.get(entry.name, 1.0))
        else:
            silent.append(entry.name)
    if silent:
        progress.note(
            f"tokens that were kept with {shorten_list(silent)} are not in the model; --task {silent[0]} puts them in"
        )
    return speakers


def config_for(
    config: Mapping[str, Any], ours: Mapping[str, Any], grown: GrownSource | None, own: Sequence[Token] = ()
) -> dict[str, Any]:
    """A config for tables as they are written: the base's (``ours``), or that of an expert with tokens of its ``own``.

    A token that an expert's config names by its number has another one now, or where it was not kept the base's.
    """
    size = ours.get("vocab_size")
    if grown and size == grown.size:
        size = rows_of(grown.forms[next(iter(grown.tables))].shape)
    numbers = {token.id: grown.rows[token.content] for token in own} if grown else {}

    def number(key: str, old: Any) -> Any:
        lost = isinstance(old, int) and isinstance(size, int) and old >= size
        return numbers.get(old, ours.get(key) if lost else old)

    fitted = dict(config)
    for key, value in config.items():
        if isinstance(value, Mapping) and isinstance(ours.get(key), Mapping):
            fitted[key] = config_for(value, ours[key], grown, own)
        elif key == "vocab_size" and size is not None:
            fitted[key] = size
        elif key.endswith("_token_id"):
            fitted[key] = [number(key, old) for old in value] if isinstance(value, list) else number(key, value)
    return fitted
