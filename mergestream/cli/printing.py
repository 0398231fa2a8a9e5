"""What commands print: lines, errors, JSON, tables, counts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mergestream.escaping import SENTENCE, one_line

LONGEST_CELL = 100


def say(line: str) -> None:
    """Print a line, whatever the names in it are; at once, for somebody may be waiting for it."""
    print(one_line(line, SENTENCE), flush=True)


def print_error(*sentences: str) -> None:
    for sentence in sentences:
        print(f"error: {one_line(sentence, SENTENCE)}", file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    """Names as they are; what is not ASCII is escaped, for a terminal obeys some of it."""
    print(json.dumps(_finite(data), indent=2, allow_nan=False))


def print_json_line(data: Any) -> None:
    """The same on one line, at once, for somebody who follows."""
    print(json.dumps(_finite(data), allow_nan=False), flush=True)


def _finite(data: Any) -> Any:
    """JSON has no infinity: the λ of a scale of 0 is null."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, left: int = 1) -> None:
    """Columns as wide as their content; the first ``left`` are text, the others numbers."""
    table = [[one_line(str(cell), LONGEST_CELL) for cell in row] for row in (headings, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(headings))]
    for row in table:
        cells = (
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


def counts_text(counts: Mapping[Any, int]) -> str:
    """``6 linear, 4 other``, the most frequent first."""
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items(), key=lambda item: -item[1]))
