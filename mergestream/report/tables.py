"""Tables of a report: their cells, and the two kinds of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mergestream.report.diagnostics import MAX_EXPERTS
from mergestream.report.wording import format_number


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


def pair_table(quantity: str, experts: Sequence[str], values: Sequence[Sequence[float | None]]) -> Table:
    """Expert × expert, for the last experts; the shades span the values of different experts."""
    names, matrix = experts[-MAX_EXPERTS:], [row[-MAX_EXPERTS:] for row in values[-MAX_EXPERTS:]]
    others = [abs(value) for i, row in enumerate(matrix) for value in (*row[:i], *row[i + 1 :]) if value is not None]
    most = max([0.05, *others])
    rows = [
        [
            Cell(names[i]),
            *(number_cell(row[j], shade=share_of(row[j], 0, most) if i != j else None) for j in range(len(row))),
        ]
        for i, row in enumerate(matrix)
    ]
    return Table((quantity, *names), rows)


def layer_table(
    experts: Sequence[str],
    layers: Sequence[str],
    values: Sequence[Sequence[float | None]],
    form: str,
    totals: Sequence[float | None] = (),
    most: float | None = None,
) -> Table:
    """Layer × expert, for the last experts; ``totals`` of all layers come first, ``values`` are expert × layer.

    ``most`` is the value with the strongest shade, by default the largest.
    """
    found: dict[str, Sequence[float | None]] = dict(zip(layers, zip(*values[-MAX_EXPERTS:], strict=True), strict=True))
    known = [value for row in found.values() for value in row if value is not None]
    most = most or max([0.05, *known])
    if totals:
        found = {"all layers": totals[-MAX_EXPERTS:], **found}
    rows = [
        [Cell(layer), *(number_cell(value, form, share_of(value, 0, most)) for value in row)]
        for layer, row in found.items()
    ]
    return Table(("layer", *experts[-MAX_EXPERTS:]), rows)


def share_of(value: float | None, least: float, most: float) -> float | None:
    return None if value is None or most <= least else (value - least) / (most - least)
