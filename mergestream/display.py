"""How objects show themselves to who asks in Python: a table in a notebook, a data frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mergestream.errors import MergestreamError
from mergestream.escaping import one_line

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_ROWS = 50


def html_table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A sentence and a table, of which the last rows are shown where there are many; names are no markup."""
    shown = rows[-MOST_ROWS:]
    lines = [f"<p>{_cell(caption)}</p>"]
    if len(shown) < len(rows):
        lines.append(f"<p>… the last {MOST_ROWS} of {len(rows)}:</p>")
    if rows:
        lines += ["<table>", _row("th", headings), *(_row("td", row) for row in shown), "</table>"]
    return "\n".join(lines)


def _row(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_cell(cell)}</{tag}>' for cell in cells)}</tr>"


def _cell(value: object) -> str:
    return escape(one_line(f"{value:.4g}" if isinstance(value, float) else str(value)))


def data_frame(rows: Iterable[Mapping[str, Any]], index: str) -> DataFrame:
    """A row each, by one of the columns."""
    frame = _pandas().DataFrame(list(rows))
    return frame.set_index(index) if len(frame) else frame


def matrix_frame(rows: Sequence[object], columns: Sequence[str], values: Sequence[Sequence[float | None]]) -> DataFrame:
    """Numbers, with what their rows and columns are; what is not known is not a number."""
    return _pandas().DataFrame(values, index=list(rows), columns=list(columns), dtype=float)


def _pandas() -> ModuleType:
    try:
        import pandas
    except ImportError as error:
        raise MergestreamError("data frames need pandas: pip install 'mergestream[pandas]'") from error
    return pandas
