"""The history of a store as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mergestream.display import data_frame, html_table
from mergestream.sizes import counted
from mergestream.store.manifest import Expert

if TYPE_CHECKING:
    from pandas import DataFrame

_COLUMNS = (
    *("name", "added", "norm", "kept", "scale", "mean_norm", "distance", "score", "rank", "seconds"),
    *("source", "digest"),
)


class History(tuple[Expert, ...]):
    """The experts in their order."""

    __slots__ = ()

    def to_frame(self) -> DataFrame:
        """A data frame with one row per expert."""
        frame = data_frame(({column: getattr(entry, column) for column in _COLUMNS} for entry in self), "name")
        return frame.assign(added=frame["added"].astype("datetime64[ns, UTC]")) if len(frame) else frame

    def _repr_html_(self) -> str:
        return self.table(counted(len(self), "expert"))

    def table(self, caption: str) -> str:
        """An HTML table for notebooks."""
        rows = [(e.name, e.norm, f"{e.kept:.1%}", e.added, e.source) for e in self]
        return html_table(caption, ("expert", "‖Δ‖", "held" if self and self[0].cut else "kept", "added", "from"), rows)
