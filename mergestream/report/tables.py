"""Tables of a report: their cells, and the two kinds of matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mergestream.report.diagnostics import Survival
from mergestream.report.wording import format_number, short_name, short_names

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


def companion_cell(found: tuple[str, float] | None) -> Cell:
    """Another expert, and how close it is."""
    if found is None:
        return Cell("–", sort="")
    name, value = found
    return replace(name_cell(name), detail=format_number(value), sort=value)


def pair_table(quantity: str, experts: Sequence[str], values: Sequence[Sequence[float | None]]) -> Table:
    """Expert × expert; the shades span the values of different experts."""
    others = [abs(value) for i, row in enumerate(values) for j, value in enumerate(row) if i != j and value is not None]
    most = max([0.05, *others])
    rows = [
        [
            name_cell(experts[i]),
            *(
                number_cell(value, shade=None if i == j or value is None else value / most)
                for j, value in enumerate(row)
            ),
        ]
        for i, row in enumerate(values)
    ]
    return Table((quantity, *short_names(experts)), rows)


def layer_table(
    layers: Survival,
    values: Sequence[Sequence[float | None]],
    form: str,
    *,
    totals: Sequence[float | None] | None = None,
    titles: Sequence[Sequence[str | None]] | None = None,
    limit: float | None = None,
    low_is_bad: bool = False,
) -> Table:
    """Layer × expert, with a first row for all layers; ``values`` are expert × layer, ``limit`` has the full shade."""
    known = [value for row in values for value in row if value is not None]
    most = limit or (1.0 if low_is_bad else max([0.05, *known]))

    def cells(row: Sequence[float | None], partners: Sequence[str | None] | None = None) -> Iterator[Cell]:
        for i, value in enumerate(row):
            partner = partners[i] if partners else None
            yield number_cell(value, form, shade=share_of(value, 0, most), title=f"with {partner}" if partner else "")

    def badness(part: int) -> float:
        return max((-value if low_is_bad else value for row in values if (value := row[part]) is not None), default=0)

    rows = [
        [Cell(name), *cells([row[part] for row in values], [row[part] for row in titles] if titles else None)]
        for part, name in enumerate(_without_common_path(layers.parts))
    ]
    order = sorted(range(len(rows)), key=lambda part: -badness(part))
    if totals:
        rows.insert(0, [Cell("all layers"), *cells(totals)])
        order = [0, *(part + 1 for part in order)]
    return Table(("layer", *short_names(layers.experts)), rows, order)


def share_of(value: float | None, least: float, most: float) -> float | None:
    return None if value is None or most <= least else (value - least) / (most - least)


def _without_common_path(names: Sequence[str]) -> list[str]:
    """Names of layers without the path that all have in common."""
    split = [name.split(".") for name in names]
    common = 0
    while len(names) > 1 and all(len(parts) > common + 1 and parts[common] == split[0][common] for parts in split):
        common += 1
    return [".".join(parts[common:]) for parts in split]
