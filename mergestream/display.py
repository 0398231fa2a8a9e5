"""Tables and data frames, for notebooks and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from mergestream.errors import MergestreamError
from mergestream.escaping import one_line

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_ROWS = 50


def html_table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A sentence and a table of the last rows; all text is escaped."""
    lines = [f"<p>{_html_text(caption)}</p>"]
    if len(rows) > MAX_ROWS:
        lines.append(f"<p>… the last {MAX_ROWS} of {len(rows)}:</p>")
    if rows:
        lines += ["<table>", _html_row("th", headings), *(_html_row("td", row) for row in rows[-MAX_ROWS:]), "</table>"]
    return "\n".join(lines)


def _html_row(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_html_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _html_text(value: object) -> str:
    return escape(one_line(f"{value:.4g}" if isinstance(value, float) else str(value)))


def markdown_table(headings: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = (" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in (headings, *rows))
    first, *others = (f"| {line} |" for line in lines)
    return [first, "|" + "---|" * len(headings), *others]


def data_frame(rows: Iterable[Mapping[str, Any]], index: str) -> DataFrame:
    """A data frame with one of the columns as its index."""
    frame = _import_pandas().DataFrame(list(rows))
    return frame.set_index(index) if len(frame) else frame


def matrix_frame(rows: Sequence[object], columns: Sequence[str], values: Sequence[Sequence[float | None]]) -> DataFrame:
    """A data frame of numbers; None becomes NaN."""
    return _import_pandas().DataFrame(values, index=list(rows), columns=list(columns), dtype=float)


def _import_pandas() -> ModuleType:
    try:
        import pandas
    except ImportError as error:
        raise MergestreamError("data frames need pandas: pip install 'mergestream[pandas]'") from error
    return cast(ModuleType, pandas)
