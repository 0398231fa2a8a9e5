"""An expert with tokens of its own, seen by the vocabulary of the base: rows in common, and new rows beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from mergestream.checkpoints import Checkpoint, TensorInfo, dtype_name, torch_dtype
from mergestream.checkpoints.layout import model_config
from mergestream.checkpoints.tokenizer import read_tokenizer, same_tokenizer
from mergestream.digest import json_digest
from mergestream.errors import MergestreamError, UsageError
from mergestream.schema import Count
from mergestream.sizes import counted, shorten_list

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.base.model import BaseModel
    from mergestream.checkpoints.tokenizer import Tokenizer

Vocab = Literal["base", "union", "grow"]
VOCABS: tuple[Vocab, ...] = get_args(Vocab)
ROWS = "tokens:"
"""Begins the name of the new rows of a table"""
_OTHER_TABLE = re.compile(r"(^|[._])(wpe|pos|position|positions|type|norm|ln|ln_f)([._]|$)|norm|position|token_type")
_CHOICES = (
    "pass --vocab base to leave them out, --vocab union to keep them with this expert, or --vocab grow to add them to "
    "the merged model"
)


@dataclass(frozen=True)
class Token:
    """A token that an expert has and the base has not."""

    content: str
    """Its text, or its number in angle brackets where no tokenizer tells"""
    id: Count
    """Its row in the expert"""
    added: Mapping[str, bool] | None
    """How it is found in a text; None where no tokenizer tells"""


class Fit(NamedTuple):
    """An expert as it is merged, the new tokens whose rows stay beside, and what is to be told of them."""

    expert: Checkpoint
    tokens: tuple[Token, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rows:
    """Which row of an expert is which of the base's."""

    ours: int
    theirs: int
    """How many rows there are"""
    place: Sequence[int]
    """For every row of the base that of the expert; -1 where it has none"""
    new: tuple[Token, ...]
    moved: tuple[str, ...] = ()
    """Tokens of the base that are in another row"""
    lacking: tuple[str, ...] = ()
    """Tokens of the base that the expert has not"""
    named: bool = True
    """Whether tokenizers tell"""

    @cached_property
    def is_prefix(self) -> bool:
        """Whether the rows of the base are the first of the expert's."""
        return list(self.place) == list(range(self.ours))


class FittedCheckpoint(Checkpoint):
    """A checkpoint whose vocabulary tables have the rows of the base; new rows are tensors of their own.

    Where the rows in common are the first ones, a table is a view of what is stored.
    """

    def __init__(
        self, expert: Checkpoint, base: Checkpoint, tables: Mapping[str, str], rows: Rows, tokens: Sequence[Token]
    ) -> None:
        """``tables`` has the names of the tables in the expert, and in the base."""
        self._expert, self._base, self._tables, self._rows = expert, base, tables, rows
        self._ids = [token.id for token in tokens]
        self._stored: dict[str, str] = {}
        """The new rows of each table, and where they are stored"""
        for name, table in tables.items() if tokens else ():
            self._stored.setdefault(f"{ROWS}{table}", name)
        self.source, self.directory, self.note = expert.source, expert.directory, expert.note
        self.copies = expert.copies + (0 if rows.is_prefix else 2)
        in_common = {name: self._form(name) for name in tables}
        new = {key: self._form_of_new(name) for key, name in self._stored.items()}
        self.tensors = MappingProxyType({**expert.tensors, **in_common, **new})
        self.aliases = expert.aliases
        if expert.fingerprint is not None:  # the tokenizer's files are not in it
            self.fingerprint = json_digest([expert.fingerprint, rows.place, [asdict(token) for token in tokens]])

    def _form(self, name: str) -> TensorInfo:
        info, ours = self._expert.tensors[name], self._base.tensors.get(self._tables[name])
        dtype = info.dtype
        if ours is not None and not self._rows.is_prefix:  # it has rows of both
            import torch

            dtype = dtype_name(torch.promote_types(torch_dtype(dtype), torch_dtype(ours.dtype)))
        return TensorInfo(dtype, with_rows(info.shape, self._rows.ours), info.file)

    def _form_of_new(self, name: str) -> TensorInfo:
        """A row for each, also of a bias."""
        info = self._expert.tensors[name]
        return TensorInfo(info.dtype, (len(self._ids), info.numel // self._rows.theirs), info.file)

    def read(self, name: str) -> Tensor:
        stored = self._stored.get(name, name)
        tensor = self._expert.read(stored)
        if stored not in self._tables:
            return tensor
        rows = tensor.reshape(self._rows.theirs, -1)
        found = rows[self._ids] if name in self._stored else self._in_common(stored, rows)
        return found.reshape(self.tensors[name].shape)

    def _in_common(self, name: str, rows: Tensor) -> Tensor:
        if self._rows.is_prefix:
            return rows[: self._rows.ours]
        import torch

        place, table = torch.tensor(self._rows.place), self._tables[name]
        missing = place < 0
        found = rows[place.clamp(min=0)].to(torch_dtype(self.tensors[name].dtype))
        if table in self._base.tensors:
            found[missing] = self._base.read(table).reshape(self._rows.ours, -1)[missing].to(found.dtype)
        else:
            found[missing] = 0
        return found

    def stored_name(self, name: str) -> str:
        return self._expert.stored_name(self._stored.get(name, name))

    def close(self) -> None:
        self._expert.close()


def fit(model: BaseModel, base: Checkpoint, expert: Checkpoint, vocab: Vocab | None, ignore: Sequence[str]) -> Fit:
    """The expert in the vocabulary of the base; refused where tokens are new and nobody says what becomes of them."""
    if vocab is not None and vocab not in VOCABS:
        raise UsageError(f"--vocab {vocab} is not one of {', '.join(VOCABS)}")
    ours = _vocabulary_size(model, base)
    tables = _tables(model, expert, ours, ignore)
    theirs = next((rows_of(expert.tensors[name].shape) for name in tables), 0)
    found = _rows(base, expert, ours, theirs) if ours and theirs else None
    if found is None:
        return Fit(expert)
    if vocab is None and theirs == ours and not found.moved:
        return Fit(expert, notes=_merged_as_rows(expert, found))
    if vocab is None and (found.new or found.moved or not found.named):
        raise MergestreamError(_refusal(expert, found, next(iter(tables))))
    heads = {name: name for name in expert.tensors if name not in model.tensors and model.is_head(name)}
    tables = {name: at for name, at in {**heads, **tables}.items() if rows_of(expert.tensors[name].shape) == theirs}
    tokens = found.new if vocab in ("union", "grow") else ()
    if tokens:
        lacking = set(_tables(model, base, ours, ()).values()) - set(tables.values())
        _check_kept(expert, found, vocab, [name for name in lacking if model.tensors[name].merges])
    return Fit(FittedCheckpoint(expert, base, tables, found, tokens), tokens, _told(expert, found, vocab))


# --- which tensors have a row for every token ---------------------------------------------------------------


def rows_of(shape: Sequence[int]) -> int:
    """How many tokens a table of this shape is for: rows of a matrix, or elements of a bias; 0 where it can be none."""
    if len(shape) not in (1, 2):
        return 0
    return shape[-1] if shape[0] == 1 else shape[0]


def with_rows(shape: Sequence[int], rows: int) -> tuple[int, ...]:
    return (1, rows) if len(shape) == 2 and shape[0] == 1 else (rows, *shape[1:])


def _vocabulary_size(model: BaseModel, base: Checkpoint) -> int:
    """How many rows the base has for tokens: as its config says, or as its largest table of words has; 0 where it has
    none."""
    sizes = [
        tensor.shape[0]
        for name, tensor in model.tensors.items()
        if tensor.role == "embedding" and len(tensor.shape) == 2 and not _OTHER_TABLE.search(name)
    ]
    try:
        content = model_config(base.directory)
        said = {**(content.get("text_config") or {}), **content}.get("vocab_size")
    except (MergestreamError, TypeError):  # its text_config is no object
        said = None
    return said if isinstance(said, int) and said in sizes else max(sizes, default=0)


def _tables(model: BaseModel, expert: Checkpoint, size: int, ignore: Sequence[str]) -> dict[str, str]:
    """The expert's tensors that have a row for every token, and what the base calls them; the embedding comes first."""
    ties, tensors = model.ties, model.tensors

    def is_one(name: str, table: str) -> bool:
        ours, theirs = tensors[table], expert.tensors[name]
        fits = rows_of(ours.shape) == size and theirs.shape == with_rows(ours.shape, rows_of(theirs.shape))
        ignored = any(fnmatchcase(known, glob) for glob in ignore for known in (name, table, expert.stored_name(name)))
        # What is written for every token is not in a layer; a norm of that size is by chance.
        outside = ours.role == "embedding" or not any(part.isdigit() for part in table.split("."))
        return fits and not ignored and outside and theirs.is_float and not _OTHER_TABLE.search(table)

    found = {name: ties.get(name, name) for name in expert.tensors if ties.get(name, name) in tensors}
    tables = {name: table for name, table in found.items() if is_one(name, table)}
    return dict(sorted(tables.items(), key=lambda item: tensors[item[1]].role != "embedding"))


# --- which row is which -------------------------------------------------------------------------------------


def _rows(base: Checkpoint, expert: Checkpoint, ours: int, theirs: int) -> Rows | None:
    """By their tokens where both have a tokenizer, else the first ones; None where they are the same anyway."""
    if ours == theirs and same_tokenizer(base.directory, expert.directory):
        return None
    one, other = read_tokenizer(base.directory), read_tokenizer(expert.directory)
    if one and other and one.end <= ours:
        return _by_token(one, other, ours, theirs)
    if ours == theirs:
        return None
    new = tuple(Token(f"<{number}>", number, None) for number in range(ours, theirs))
    place = [row if row < theirs else -1 for row in range(ours)]
    return Rows(ours, theirs, place, new, named=False)


def _by_token(one: Tokenizer, other: Tokenizer, ours: int, theirs: int) -> Rows | None:
    here = {token: row for token, row in other.ids.items() if row < theirs}
    taken = set(here.values())
    place = [row if row < theirs and row not in taken else -1 for row in range(ours)]  # both have it as padding
    for token, row in one.ids.items():
        place[row] = here.get(token, -1)
    new = sorted((row, token) for token, row in here.items() if token not in one.ids)
    moved = tuple(token for token, row in one.ids.items() if here.get(token, row) != row)
    lacking = tuple(token for token in one.ids if token not in here)
    tokens = tuple(Token(token, row, other.added.get(token)) for row, token in new)
    return Rows(ours, theirs, place, tokens, moved, lacking) if tokens or moved or ours != theirs else None


# --- what is told -------------------------------------------------------------------------------------------


def _refusal(expert: Checkpoint, rows: Rows, table: str) -> str:
    if rows.new and rows.named:
        return f"{expert.source} has {some_tokens(rows.new)} that the base has not; {_CHOICES}"
    if rows.moved:
        return (
            f"{expert.source} has {some(rows.moved)} of the base in other rows of its embedding; pass --vocab base to "
            "merge the rows of the same tokens"
        )
    remedy = _CHOICES if rows.new else "pass --vocab base to leave the rows that it lacks unchanged"
    return (
        f"tensor {expert.stored_name(table)} in {expert.tensors[table].file} of {expert.source} has {rows.theirs} rows "
        f"and the base has {rows.ours}: its vocabulary is another one, and no tokenizer tells which tokens are new; if "
        f"the first {min(rows.ours, rows.theirs)} are the same, {remedy}"
    )


def _check_kept(expert: Checkpoint, rows: Rows, vocab: Vocab | None, lacking: Sequence[str]) -> None:
    """Refuse tokens that could not be given back with rows and a tokenizer."""
    if vocab == "grow" and not rows.named:
        raise MergestreamError(
            f"{expert.source} or its base has no tokenizer.json, so that nothing tells which tokens are new and none "
            "can be added to the merged model; pass --vocab base or --vocab union"
        )
    if own := [token for token in rows.new if rows.named and token.added is None]:
        raise MergestreamError(
            f"{expert.source} has a vocabulary of its own: {some_tokens(own)} in it were not added to the base's; "
            "pass --vocab base to merge the tokens that both have"
        )
    if lacking:
        raise MergestreamError(
            f"{expert.source} has {some_tokens(rows.new)} that the base has not, and no rows for them in "
            f"{min(lacking)}; pass --vocab base to leave them out"
        )


def _told(expert: Checkpoint, rows: Rows, vocab: Vocab | None) -> tuple[str, ...]:
    """What becomes of the rows, in sentences."""
    told = []
    if not rows.named:
        told.append(
            f"no tokenizer tells which tokens are in the {rows.theirs} rows of {expert.source}: its first rows are "
            "taken for the base's, and the others are called by their numbers"
        )
    if rows.new:
        taken = sum(token.id < rows.ours for token in rows.new)
        padding = f" ({taken} in rows that are padding or other tokens in the base)" if taken else ""
        becomes = {
            "union": "they are kept with it, for --task or --readout expert:NAME at export",
            "grow": "they are added to the merged model",
        }.get(vocab or "", "they are left out")
        told.append(f"{expert.source} has {some_tokens(rows.new)} that the base has not: {becomes}{padding}")
    if rows.moved:
        told.append(f"{expert.source} has {some(rows.moved)} of the base in other rows: merged by token, not by row")
    if rows.lacking:
        told.append(f"{expert.source} lacks {some(rows.lacking)} of the base: taken for unchanged")
    if not told:
        told.append(f"{expert.source} has {rows.theirs} rows and the base {rows.ours} for the same tokens and padding")
    return tuple(told)


def _merged_as_rows(expert: Checkpoint, rows: Rows) -> tuple[str, ...]:
    if not rows.new:
        return ()
    return (
        f"{expert.source} has {some_tokens(rows.new)} in rows that are padding or other tokens in the base, merged as "
        "these rows; --vocab base, union or grow goes by token",
    )


def some_tokens(tokens: Sequence[Token]) -> str:
    return some([token.content for token in tokens])


def some(names: Sequence[str]) -> str:
    """How many tokens, and the first of them."""
    return f"{counted(len(names), 'token')} ({shorten_list(names)})"
