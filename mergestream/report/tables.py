"""Tables of a report: their cells, and the two kinds of matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING

from mergestream.report.wording import format_number, short_name, short_names

if TYPE_CHECKING:
    from mergestream.store import Expert

MAX_ROWS = 20
"""Layers that Markdown lists, the worst first"""


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
    worst_first: Sequence[int] | None = None
    """The order of the rows in Markdown, which lists the first ones only; None for all, as they are"""

    @property
    def listed(self) -> Sequence[Sequence[Cell]]:
        """The rows for Markdown."""
        return self.rows if self.worst_first is None else [self.rows[i] for i in self.worst_first[:MAX_ROWS]]


def name_cell(name: str) -> Cell:
    return Cell(short_name(name), sort=name, title="" if short_name(name) == name else name)


def number_cell(value: float | None, form: str = ".3f", shade: float | None = None, title: str = "") -> Cell:
    return Cell(format_number(value, form), sort="" if value is None else value, shade=shade, title=title)


def companion_cell(found: tuple[float, str] | None) -> Cell:
    """Another expert, and how close it is."""
    if found is None:
        return Cell("–", sort="")
    value, name = found
    return replace(name_cell(name), detail=format_number(value), sort=value)


def step_table(history: Sequence[Expert], columns: Mapping[str, Sequence[float | None]], form: str) -> Table:
    """Step × quantity."""
    rows = [
        [name_cell(entry.name), Cell(str(step)), *(number_cell(values[step - 1], form) for values in columns.values())]
        for step, entry in enumerate(history, 1)
    ]
    return Table(("expert", "step", *columns), rows)


def pair_table(quantity: str, experts: Sequence[str], values: Iterable[Sequence[float | None]]) -> Table:
    """Expert × expert; the shades span the values of different experts."""
    matrix = list(values)
    known = [abs(value) for i, row in enumerate(matrix) for value in (*row[:i], *row[i + 1 :]) if value is not None]
    most = max([0.05, *known])
    rows = []
    for i, row in enumerate(matrix):
        shades = [None if i == j else share_of(value, 0, most) for j, value in enumerate(row)]
        rows.append([name_cell(experts[i]), *map(number_cell, row, repeat(".3f"), shades)])
    return Table((quantity, *short_names(experts)), rows)


def layer_table(
    experts: Sequence[str],
    layers: Sequence[str],
    values: Sequence[Sequence[float | None]],
    form: str,
    *,
    totals: Sequence[float | None] = (),
    partners: Sequence[Sequence[str | None]] = (),
    low_is_bad: bool = False,
) -> Table:
    """Layer × expert, with a first row for all layers; ``values`` and ``partners`` are expert × layer."""
    by_layer = list(zip(*values, strict=True))
    known = [value for row in by_layer for value in row if value is not None]
    most = 1.0 if low_is_bad else max([0.05, *known])

    def badness(row: Sequence[float | None]) -> float:
        return max((-value if low_is_bad else value for value in row if value is not None), default=-math.inf)

    rows = []
    for i, row in enumerate(by_layer):
        titles = [f"with {row[i]}" if row[i] else "" for row in partners] or repeat("")
        shades = [share_of(value, 0, most) for value in row]
        rows.append([Cell(layers[i]), *map(number_cell, row, repeat(form), shades, titles)])
    order = sorted(range(len(rows)), key=lambda i: -badness(by_layer[i]))
    if totals:
        shades = [share_of(value, 0, most) for value in totals]
        rows.insert(0, [Cell("all layers"), *map(number_cell, totals, repeat(form), shades)])
        order = [0, *(i + 1 for i in order)]
    return Table(("layer", *short_names(experts)), rows, order)


def share_of(value: float | None, least: float, most: float) -> float | None:
    return None if value is None or most <= least else (value - least) / (most - least)
