"""JSON of our own: read strictly, and held against the types that it is to become.

Python's parser takes NaN, infinities, a key that is there twice and half a surrogate pair; nothing that we write has
them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, convert

from mergestream.errors import DamagedError, MergestreamError

T = TypeVar("T")

BACKUP = "restore the store from a backup"
Count = Annotated[int, Meta(ge=0, le=2**53)]
Number = Annotated[int, Meta(ge=1, le=2**53)]
Finite = Annotated[float, Meta(ge=-1e150, le=1e150)]
"""A number whose square is one, too"""
Magnitude = Annotated[float, Meta(ge=0, le=1e150)]
Plain = bool | int | float | str | None


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise MergestreamError(f"{path} cannot be read: {error.strerror}; {BACKUP}") from error
    except ValueError as error:
        raise damaged(path, "it is no text") from error


def parse(text: str, path: Path) -> dict[str, Any]:
    """The object that a file holds as JSON."""
    try:
        content = json.loads(text, object_pairs_hook=_table, parse_float=_finite, parse_constant=_finite)
        json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise damaged(path, "it is not valid JSON") from error
    if not isinstance(content, dict):
        raise damaged(path, "it is not a JSON object")
    return content


def validate(data: Any, kind: type[T], path: Path) -> T:
    """What was parsed as the type that it is to be."""
    try:
        return convert(data, kind)
    except ValueError as error:
        raise invalid_file(path, str(error)) from error


def damaged(path: Path, reason: str, remedy: str = BACKUP) -> MergestreamError:
    """For a file that is not what was written: a disk has lost something, or somebody has edited it."""
    return DamagedError(f"{path} is damaged: {reason}; {remedy}")


def invalid_file(path: Path, reason: str) -> MergestreamError:
    """For a file that is as it was written, but not by us."""
    return DamagedError(f"{path} is not one of ours: {reason}; {BACKUP}")


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key is there twice")
    return table


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number")
    return value
