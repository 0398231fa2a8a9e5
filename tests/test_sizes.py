from __future__ import annotations

from typing import Any

import pytest

from mergestream.errors import UsageError
from mergestream.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0B", 0),
        ("512 b", 512),
        ("4GB", 4 * 10**9),
        ("4 gb", 4 * 10**9),
        ("1.5G", 1_500_000_000),
        ("512MiB", 512 * 2**20),
        ("2ki", 2048),
        ("3tb", 3 * 10**12),
    ],
)
def test_sizes_are_parsed(text: str, size: Any) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("number", ["4", "0", "1.5"])
def test_a_size_without_a_unit_is_refused_with_suggestions(number: str) -> None:
    with pytest.raises(UsageError, match=f"without a unit; write {number}GB, {number}MB or {number}B"):
        parse_size(number)


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "4XB", "four", "1e9", "1,5GB", "i", "4 G B"])
def test_an_invalid_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a size; write for example 500MB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (360_000_000, "360 MB"), (5e12, "5.0 TB")],
)
def test_sizes_are_formatted(size: float, text: str) -> None:
    assert format_size(size) == text
