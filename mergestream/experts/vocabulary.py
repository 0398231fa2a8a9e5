"""Fit an expert with added tokens to the base's vocabulary: rows in common are merged, new rows are kept apart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from mergestream.checkpoints import Checkpoint, TensorInfo, dtype_name, torch_dtype
from mergestream.checkpoints.checkpoint import RenamedCheckpoint
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
"""Prefix of the names of tensors with new rows"""
_OTHER_TABLE = re.compile(r"(^|[._])(wpe|pos|position|positions|type|norm|ln|ln_f)([._]|$)|norm|position|token_type")
_CHOICES = (
    "pass --vocab base to leave them out, --vocab union to keep them with this expert, or --vocab grow to add them to "
    "the merged model"
)


@dataclass(frozen=True)
class Token:
    """A token that the expert has and the base does not."""

    content: str
    """Its text, or its id in angle brackets if there is no tokenizer"""
    id: Count
    """Its row in the expert"""
    added: Mapping[str, bool] | None
    """The flags of an added token; None if there is no tokenizer"""


@dataclass(frozen=True)
class RowMap:
    """Which rows of base and expert belong to the same token."""

    ours: int
    theirs: int
    """Number of rows of base and expert"""
    place: Sequence[int]
    """For every row of the base, the row of the expert, or -1"""
    new: tuple[Token, ...]
    moved: tuple[str, ...] = ()
    """Tokens of the base that are in another row"""
    missing: tuple[str, ...] = ()
    """Tokens of the base that the expert does not have"""
    named: bool = True
    """Whether tokenizers gave the names of the tokens"""

    @cached_property
    def is_prefix(self) -> bool:
        """Whether the rows of the base are the first rows of the expert."""
        return list(self.place) == list(range(self.ours))


class FittedCheckpoint(RenamedCheckpoint):
    """A checkpoint whose vocabulary tables have the base's rows; new rows are separate tensors.

    If the rows in common are the first ones, a table is a view of what is stored.
    """

    def __init__(
        self, expert: Checkpoint, base: Checkpoint, tables: Mapping[str, str], rows: RowMap, tokens: Sequence[Token]
    ) -> None:
        """``tables`` maps the expert's tables to the base's."""
        self._base, self._tables, self._rows = base, tables, rows
        self._ids = [token.id for token in tokens]
        self._new: dict[str, str] = {}
        """The tensors with new rows, and the tables that hold them"""
        for name, table in tables.items() if tokens else ():
            self._new.setdefault(f"{ROWS}{table}", name)
        super().__init__(expert, {name: name for name in expert.tensors} | self._new)
        tensors = dict(self.tensors)
        for name, table in tables.items():
            info, dtype = expert.tensors[name], expert.tensors[name].dtype
            if table in base.tensors and not rows.is_prefix:  # rows come from both
                import torch

                both = torch_dtype(dtype), torch_dtype(base.tensors[table].dtype)
                dtype = dtype_name(torch.promote_types(*both))
            tensors[name] = TensorInfo(dtype, with_rows(info.shape, rows.ours), info.file)
        for key, name in self._new.items():
            info = expert.tensors[name]
            tensors[key] = TensorInfo(info.dtype, (len(tokens), info.numel // rows.theirs), info.file)
        self.tensors = tensors
        self.copies += 0 if rows.is_prefix else 2
        self.aliases = expert.aliases
        if expert.fingerprint is not None:  # it does not cover the tokenizer's files
            self.fingerprint = json_digest([expert.fingerprint, rows.place, [asdict(token) for token in tokens]])

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        if name not in self._tables and name not in self._new:
            return tensor
        rows = tensor.reshape(self._rows.theirs, -1)
        found = rows[self._ids] if name in self._new else self._read_common(name, rows)
        return found.reshape(self.tensors[name].shape)

    def _read_common(self, name: str, rows: Tensor) -> Tensor:
        """The rows of the base's tokens; the base's own row for a token that the expert lacks."""
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


def fit_vocabulary(
    model: BaseModel, base: Checkpoint, expert: Checkpoint, vocab: Vocab | None, ignore: Sequence[str]
) -> tuple[Checkpoint, tuple[Token, ...], tuple[str, ...]]:
    """Fit an expert to the base's vocabulary; refuse new tokens unless ``vocab`` says what to do with them.

    Returns the expert with the base's rows, the new tokens that are kept, and notes for the user.
    """
    if vocab is not None and vocab not in VOCABS:
        raise UsageError(f"--vocab {vocab} is not one of {', '.join(VOCABS)}")
    ours = _vocabulary_size(model, base)
    tables = _find_tables(model, expert, ours, ignore)
    theirs = next((rows_of(expert.tensors[name].shape) for name in tables), 0)
    rows = _match_rows(base, expert, ours, theirs) if ours and theirs else None
    if rows is None:
        return expert, (), ()
    if vocab is None and theirs == ours and not rows.moved:
        note = (
            f"{expert.source} has {list_tokens(rows.new)} in rows that are padding or other tokens in the base; they "
            "are merged row by row. Pass --vocab base, union or grow to merge by token."
        )
        return expert, (), (note,) if rows.new else ()
    if vocab is None and (rows.new or rows.moved or not rows.named):
        raise _refuse_tokens(expert, rows, next(iter(tables)))
    heads = {name: name for name in expert.tensors if name not in model.tensors and model.is_head(name)}
    tables = {name: at for name, at in {**heads, **tables}.items() if rows_of(expert.tensors[name].shape) == theirs}
    tokens = rows.new if vocab in ("union", "grow") else ()
    if tokens:
        without_rows = set(_find_tables(model, base, ours, ()).values()) - set(tables.values())
        _check_new_tokens(expert, rows, vocab, [name for name in without_rows if model.tensors[name].merges])
    return FittedCheckpoint(expert, base, tables, rows, tokens), tokens, _make_notes(expert, rows, vocab)


# --- which tensors have a row for every token ---------------------------------------------------------------


def rows_of(shape: Sequence[int]) -> int:
    """The number of tokens of a table: rows of a matrix, or elements of a bias; 0 for other tensors."""
    if len(shape) not in (1, 2):
        return 0
    return shape[-1] if shape[0] == 1 else shape[0]


def with_rows(shape: Sequence[int], rows: int) -> tuple[int, ...]:
    """The shape of a table with another number of tokens."""
    return (1, rows) if len(shape) == 2 and shape[0] == 1 else (rows, *shape[1:])


def _vocabulary_size(model: BaseModel, base: Checkpoint) -> int:
    """The rows of the base's word embedding: those its config gives, or those of its largest table; 0 if none."""
    sizes = [
        tensor.shape[0]
        for name, tensor in model.tensors.items()
        if tensor.role == "embedding" and len(tensor.shape) == 2 and not _OTHER_TABLE.search(name)
    ]
    try:
        config = model_config(base.directory)
        size = {**(config.get("text_config") or {}), **config}.get("vocab_size")
    except (MergestreamError, TypeError):  # text_config is no object
        size = None
    return size if isinstance(size, int) and size in sizes else max(sizes, default=0)


def _find_tables(model: BaseModel, expert: Checkpoint, size: int, ignore: Sequence[str]) -> dict[str, str]:
    """The expert's tensors that have a row for every token, and their names in the base; embeddings first."""
    ties, tensors = model.ties, model.tensors
    tables = {}
    for name, theirs in expert.tensors.items():
        table = ties.get(name, name)
        if table not in tensors or not theirs.is_float or _OTHER_TABLE.search(table):
            continue
        ours = tensors[table]
        fits = rows_of(ours.shape) == size and theirs.shape == with_rows(ours.shape, rows_of(theirs.shape))
        ignored = any(fnmatchcase(known, glob) for glob in ignore for known in (name, table, expert.stored_name(name)))
        # A tensor inside a layer has this size by chance.
        in_layer = ours.role != "embedding" and any(part.isdigit() for part in table.split("."))
        if fits and not ignored and not in_layer:
            tables[name] = table
    return dict(sorted(tables.items(), key=lambda item: tensors[item[1]].role != "embedding"))


# --- which row is which -------------------------------------------------------------------------------------


def _match_rows(base: Checkpoint, expert: Checkpoint, ours: int, theirs: int) -> RowMap | None:
    """Match rows by token if both have a tokenizer, else the first ones; None if all rows are the same."""
    if ours == theirs and same_tokenizer(base.directory, expert.directory):
        return None
    one, other = read_tokenizer(base.directory), read_tokenizer(expert.directory)
    if one and other and one.end <= ours:
        return _match_tokens(one, other, ours, theirs)
    if ours == theirs:
        return None
    new = tuple(Token(f"<{number}>", number, None) for number in range(ours, theirs))
    place = [row if row < theirs else -1 for row in range(ours)]
    return RowMap(ours, theirs, place, new, named=False)


def _match_tokens(one: Tokenizer, other: Tokenizer, ours: int, theirs: int) -> RowMap | None:
    here = {token: row for token, row in other.ids.items() if row < theirs}
    taken = set(here.values())
    place = [row if row < theirs and row not in taken else -1 for row in range(ours)]  # padding in both
    for token, row in one.ids.items():
        place[row] = here.get(token, -1)
    new = sorted((row, token) for token, row in here.items() if token not in one.ids)
    moved = tuple(token for token, row in one.ids.items() if here.get(token, row) != row)
    missing = tuple(token for token in one.ids if token not in here)
    tokens = tuple(Token(token, row, other.added.get(token)) for row, token in new)
    return RowMap(ours, theirs, place, tokens, moved, missing) if tokens or moved or ours != theirs else None


# --- errors and notes ---------------------------------------------------------------------------------------


def _refuse_tokens(expert: Checkpoint, rows: RowMap, table: str) -> MergestreamError:
    """The error for another vocabulary without ``--vocab``."""
    if rows.new and rows.named:
        return MergestreamError(f"{expert.source} has {list_tokens(rows.new)} that the base does not have; {_CHOICES}")
    if rows.moved:
        return MergestreamError(
            f"{expert.source} has {list_tokens(rows.moved)} of the base in other rows of its embedding; pass --vocab "
            "base to merge the rows of the same tokens"
        )
    remedy = _CHOICES if rows.new else "pass --vocab base to leave the missing rows unchanged"
    return MergestreamError(
        f"{expert.place(table)} has {rows.theirs} rows and the base has {rows.ours}, and no tokenizer "
        f"shows which tokens are new; if the first {min(rows.ours, rows.theirs)} are the same, {remedy}"
    )


def _check_new_tokens(expert: Checkpoint, rows: RowMap, vocab: Vocab | None, without_rows: Sequence[str]) -> None:
    """Refuse new tokens that an export could not restore with rows and a tokenizer."""
    if vocab == "grow" and not rows.named:
        raise MergestreamError(
            f"{expert.source} or its base has no tokenizer.json, so the new tokens are unknown and cannot be added to "
            "the merged model; pass --vocab base or --vocab union"
        )
    if own := [token for token in rows.new if rows.named and token.added is None]:
        raise MergestreamError(
            f"{expert.source} has a vocabulary of its own: {list_tokens(own)} in it were not added to the base's; "
            "pass --vocab base to merge the tokens that both have"
        )
    if without_rows:
        raise MergestreamError(
            f"{expert.source} has {list_tokens(rows.new)} that the base does not have, and no rows for them in "
            f"{min(without_rows)}; pass --vocab base to leave them out"
        )


def _make_notes(expert: Checkpoint, rows: RowMap, vocab: Vocab | None) -> tuple[str, ...]:
    """Sentences that say what happens to the rows."""
    source, notes = expert.source, []
    if not rows.named:
        notes.append(
            f"{source}: no tokenizer names the tokens of its {rows.theirs} rows; the first rows are taken for the "
            "base's, the others are named by their ids"
        )
    if rows.new:
        taken = sum(token.id < rows.ours for token in rows.new)
        padding = f" ({taken} in rows that are padding or other tokens in the base)" if taken else ""
        action = {
            "union": "they are kept with it, for --task or --readout expert:NAME at export",
            "grow": "they are added to the merged model",
        }.get(vocab or "", "they are left out")
        notes.append(f"{source} has {list_tokens(rows.new)} that the base does not have: {action}{padding}")
    if rows.moved:
        notes.append(f"{source} has {list_tokens(rows.moved)} of the base in other rows: merged by token, not by row")
    if rows.missing:
        notes.append(f"{source} lacks {list_tokens(rows.missing)} of the base: they stay unchanged")
    if not notes:
        notes.append(f"{source} has {rows.theirs} rows and the base {rows.ours} for the same tokens and padding")
    return tuple(notes)


def list_tokens(tokens: Sequence[Token | str]) -> str:
    """The number of tokens, and the first of them."""
    names = [token if isinstance(token, str) else token.content for token in tokens]
    return f"{counted(len(names), 'token')} ({shorten_list(names)})"
