"""JSON of ours: what Python's parser takes and we never write is refused, and so is what has another type."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mergestream.errors import MergestreamError
from mergestream.schema import Count, Magnitude, parse, validate

PATH = Path("store/ours.json")


@dataclass(frozen=True)
class Thing:
    name: str
    size: Count
    norm: Magnitude
    shape: tuple[Count, ...] = ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": 1, "a": 1}',
        '{"a": {"b": 1, "b": 2}}',
        '{"a": "\\ud800"}',
        '{"\\udfff": 1}',
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"a": ' + "9" * 6000 + "}",
        "[1]",
        "null",
    ],
    ids=range(13),
)
def test_what_we_never_write_is_damage(text: Any) -> None:
    with pytest.raises(MergestreamError, match=r"^store/ours\.json is damaged: it is not .*; restore the store"):
        parse(text, PATH)


def test_all_else_is_read() -> None:
    text = '{"λ": [1, 2.5, null, "\\u0007", "\\ud83d\\ude00"]}'
    assert parse(text, PATH) == {"λ": [1, 2.5, None, "\a", "😀"]}


def test_a_field_that_is_not_as_it_must_be_is_named() -> None:
    good = {"name": "a", "size": 1, "norm": 2, "shape": [3]}
    assert validate(good, Thing, PATH) == Thing("a", 1, 2.0, (3,))
    for field, value, named in [
        ("name", None, "name"),
        ("size", True, "size"),
        ("size", 1.5, "size"),
        ("size", -1, "size"),
        ("size", 10**400, "size"),
        ("norm", "1", "norm"),
        ("norm", 1e300, "norm"),
        ("norm", 10**400, "norm"),
        ("shape", [1, -1], r"shape\[1\]"),
        ("shape", 7, "shape"),
    ]:
        with pytest.raises(
            MergestreamError, match=rf"^store/ours\.json was not written by mergestream: .*{named}.*; restore"
        ):
            validate({**good, field: value}, Thing, PATH)
    with pytest.raises(MergestreamError, match="missing required field `norm`"):
        validate({"name": "a", "size": 1}, Thing, PATH)
