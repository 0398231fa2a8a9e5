"""Strict reading of our own JSON files: parse, then validate against typed schemas.

Python's parser accepts NaN, infinities, duplicate keys and unpaired surrogates. Our files never contain them, so they
are refused.
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
"""A number whose square is finite too"""
Magnitude = Annotated[float, Meta(ge=0, le=1e150)]
Plain = bool | int | float | str | None


def parse(text: str, path: Path | str) -> dict[str, Any]:
    """Parse the JSON object of a file."""
    try:
        content = json.loads(text, object_pairs_hook=unique_keys, parse_float=_finite, parse_constant=_finite)
        json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise damaged(path, "it is not valid JSON") from error
    if not isinstance(content, dict):
        raise damaged(path, "it is not a JSON object")
    return content


def validate(data: Any, kind: type[T], path: Path | str) -> T:
    """Convert parsed JSON to a typed object; raise if it does not match the schema."""
    try:
        return convert(data, kind)
    except ValueError as error:
        raise invalid_file(path, str(error)) from error


def damaged(path: Path | str, reason: str, remedy: str = BACKUP) -> MergestreamError:
    """The error for a file that changed after it was written: by a disk fault, or by hand."""
    return DamagedError(f"{path} is damaged: {reason}; {remedy}")


def invalid_file(path: Path | str, reason: str) -> MergestreamError:
    """The error for a file that is intact but was not written by mergestream."""
    return DamagedError(f"{path} was not written by mergestream: {reason}; {BACKUP}")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for `json.loads` that refuses duplicate keys."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("duplicate key")
    return table


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
