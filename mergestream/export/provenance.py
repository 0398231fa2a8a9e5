"""What a model card tells of its making: every expert that was added, from where, when and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints.location import shown
from mergestream.errors import MergestreamError
from mergestream.escaping import code, markdown_text

if TYPE_CHECKING:
    from mergestream.store.manifest import Expert, Manifest
    from mergestream.store.mirror import Place
    from mergestream.store.snapshot import Snapshot


@dataclass(frozen=True)
class Added:
    """One expert as it came."""

    name: str
    source: str
    """As others may see it"""
    digest: str
    norm: float
    kept: float
    added: str = ""
    """When, in UTC; empty where nobody has taken it down"""
    how: str = ""
    """Options, gates and the score"""


@dataclass(frozen=True)
class Provenance:
    """All that came, and what of it was taken back."""

    experts: Sequence[Added] = ()
    departed: Sequence[str] = ()

    @classmethod
    def of(cls, store: Place, manifest: Manifest, heard: Mapping[str, float] | None = None) -> Provenance:
        """Of a store; where experts were chosen, ``heard`` are those."""
        from mergestream.store.watched import recall

        history, departed = manifest.history, set[str]()
        with suppress(MergestreamError):  # what nothing depends on
            departed = {source for source, left in recall(store).items() if left.options is None}
        names = sorted(Path(source).name for source in departed - {entry.source for entry in history})
        return cls([_added(entry, heard is None or entry.name in heard) for entry in history], names)

    def markdown(self) -> list[str]:
        """A section of a card, in lines."""
        if not self.experts:
            return []
        return [
            *(
                "",
                "## History",
                "",
                "| added | expert | source | digest | ‖Δ‖ | kept | how |",
                "|---|---|---|---|---|---|---|",
            ),
            *(_row(expert) for expert in self.experts),
            *(["", f"Taken back since: {markdown_text(', '.join(self.departed))}."] if self.departed else []),
        ]


def undated(snapshot: Snapshot) -> Snapshot:
    """Of a store that is there for one export only: its card tells what was made, and not when, so that it is the same
    whenever it is made."""
    history = tuple(dataclasses.replace(entry, added="") for entry in snapshot.manifest.history)
    return dataclasses.replace(snapshot, manifest=dataclasses.replace(snapshot.manifest, history=history))


def _added(entry: Expert, heard: bool) -> Added:
    told = [option_text(key, value) for key, value in entry.options.items() if value]
    told += [f"{gate['gate']} ({gate['value']:.4g})" for gate in entry.gates if gate["value"] is not None]
    told += [f"score {entry.evaluation['score']:.4g}"] if entry.evaluation else []
    told += [] if heard else ["left out of this model"]
    source = shown(entry.source, entry.given)
    return Added(entry.name, source, entry.digest, entry.norm, entry.kept, entry.added, ", ".join(told))


def option_text(key: str, value: Any) -> str:
    """An option as it is typed."""
    values = value if isinstance(value, list) else [value]
    flag = f"--{key.replace('_', '-')}"
    return flag if value is True else " ".join(f"{flag} {each}" for each in values)


def _row(expert: Added) -> str:
    cells = (
        *(expert.added or "–", markdown_text(expert.name), code(expert.source), code(expert.digest)),
        *(f"{expert.norm:.4g}", f"{expert.kept:.1%}", markdown_text(expert.how)),
    )
    return f"| {' | '.join(cells)} |"
