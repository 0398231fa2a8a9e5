"""Sizes in bytes and other counts, and how people write and read them."""

from __future__ import annotations

import re
from collections.abc import Collection

from mergestream.errors import UsageError

CACHE_LINE = 64
"""Where torch lets its arrays start, and we let a file's"""

_UNITS = {
    "b": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_size(text: str) -> int:
    """``4GB`` → 4 000 000 000, ``512MiB`` → 536 870 912."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(b|[kmgt]i?(?=b?$))?b?", text.strip().lower())
    if match is None:
        raise UsageError(f"{text} is not a size; write for example 500MB or 4GiB")
    number, unit = match.groups()
    if unit is None:
        raise UsageError(f"{text} is a size without a unit; write {number}GB, {number}MB or {number}B")
    return int(float(number) * _UNITS[unit])


def format_size(size: float) -> str:
    """1 234 567 → ``1.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def counted(number: int, what: str) -> str:
    """``1 expert``, ``3 experts``"""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def shorten_list(names: Collection[str], most: int = 3) -> str:
    """``a, b, c, …``: the first of them, and whether there are more."""
    return ", ".join(list(names)[:most]) + (", …" if len(names) > most else "")
