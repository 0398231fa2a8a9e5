"""Sizes in bytes and counts: parse what users write, format what they read."""

from __future__ import annotations

import re
from collections.abc import Collection

from mergestream.errors import UsageError

CACHE_LINE = 64
"""Alignment of arrays in bytes: what torch allocates, and where data in our files starts"""

_PREFIXES = "bkmgt"


def parse_size(text: str) -> int:
    """Parse bytes: ``4GB`` → 4 000 000 000, ``512MiB`` → 536 870 912."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(b|[kmgt]i?(?=b?$))?b?", text.strip().lower())
    if match is None:
        raise UsageError(f"{text} is not a size; write for example 500MB or 4GiB")
    number, unit = match.groups()
    if unit is None:
        raise UsageError(f"{text} is a size without a unit; write {number}GB, {number}MB or {number}B")
    step = 1024 if unit.endswith("i") else 1000
    return int(float(number) * step ** _PREFIXES.index(unit[0]))


def format_size(size: float) -> str:
    """Format bytes: 1 234 567 → ``1.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: ``1 expert``, ``3 experts``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shorten_list(names: Collection[str], most: int = 3) -> str:
    """List the first names: ``a, b, c, …``."""
    return ", ".join(list(names)[:most]) + (", …" if len(names) > most else "")
