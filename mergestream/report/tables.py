"""How the report writes names, numbers, lists of cases and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mergestream.escaping import one_line
from mergestream.sizes import shorten_list

MAX_NAME = 32
"""Characters of a name, in tables and sentences alike"""
MAX_FINDINGS = 5
"""Findings of one kind that are listed"""


@dataclass(frozen=True)
class Cell:
    """One cell of a table; all but the text and the detail is for the page."""

    text: str
    detail: str = ""
    """Follows the text, less prominent"""
    sort: float | str | None = None
    """What the column is sorted by, instead of the text"""
    bar: float | None = None
    """The length of a bar, from 0 to 1"""
    shade: float | None = None
    """The strength of the background, from −1 to 1"""
    title: str = ""
    """Shown when the mouse is over the cell"""


@dataclass(frozen=True)
class Table:
    """Rows of cells; the first cell of a row says what the row is."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def number_cell(value: float | None, form: str = ".3f", shade: float | None = None) -> Cell:
    return Cell(format_number(value, form), sort="" if value is None else value, shade=shade)


def shaded_table(
    corner: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[float | None]],
    form: str = ".3f",
    least: float = 0.0,
    most: float = 1.0,
) -> Table:
    """A matrix with shades from ``least`` to ``most``.

    Cells whose row and column have the same name are not shaded: an expert is most like itself.
    """

    def cell(name: str, column: str, value: float | None) -> Cell:
        if value is None or name == column or most <= least:
            return number_cell(value, form)
        return number_cell(value, form, min((value - least) / (most - least), 1.0))

    cells = [
        [Cell(name), *(cell(name, *pair) for pair in zip(columns, row, strict=True))] for name, row in rows.items()
    ]
    return Table((corner, *columns), cells)


def short_name(name: str) -> str:
    """A name on one line, shortened in the middle."""
    return one_line(name, MAX_NAME)


def short_names(names: Iterable[str]) -> list[str]:
    """Several names, shortened; names that become equal get a mark each, so that they stay apart."""
    found: dict[str, None] = {}
    for name in map(short_name, names):
        while name in found:
            name += "′"
        found[name] = None
    return list(found)


def format_number(value: float | None, form: str = ".3f") -> str:
    """A number with a real minus sign; a dash for an unknown value."""
    return "–" if value is None else format(value, form).replace("-", "−")


def format_range(values: Sequence[float], form: str) -> str:
    """``0.08 to 0.24``"""
    least, most = (format_number(value + 0.0, form) for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def list_some(cases: Sequence[str]) -> str:
    """The first cases of one kind, and how many there are: ``a, b, … (20 in all)``"""
    count = f" ({len(cases)} in all)" if len(cases) > MAX_FINDINGS else ""
    return shorten_list(cases, MAX_FINDINGS) + count
