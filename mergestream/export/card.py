"""The model card: what was merged, how, and the command that makes it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mergestream import __version__
from mergestream.checkpoints.location import shown
from mergestream.escaping import code, markdown_text, one_line
from mergestream.export.provenance import Provenance
from mergestream.merging.entries import EntriesReading
from mergestream.merging.reading import Reading, StateReading
from mergestream.methods.scale import displayed_scale
from mergestream.sizes import counted

if TYPE_CHECKING:
    from mergestream.store.manifest import Expert
    from mergestream.store.snapshot import Snapshot

COMMAND = 100_000
"""Characters of a command, which is to be copied whole: hundreds of experts may be named in it"""


@dataclass(frozen=True)
class CardRow:
    """One merged model that no store has an entry of."""

    name: str
    digest: str
    norm: float
    kept: float
    scale: float


@dataclass(frozen=True)
class CardFacts:
    """What a card tells."""

    base: str
    method: str
    parameters: Mapping[str, Any]
    experts: Sequence[CardRow | Expert]
    scale: float
    """merged = θ⁰ + scale · direction"""
    distance: float
    task: str | None = None
    command: str | None = None
    pictures: Mapping[str, str] = field(default_factory=dict)
    """Files beside the card, and what they show"""
    readout: str = "plain"
    weights: Mapping[str, float] | None = None
    """Of the experts, where the method remembers them"""
    provenance: Provenance = field(default_factory=Provenance)

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        reading: Reading,
        scale: float,
        distance: float,
        task: str | None,
        command: str | None,
        pictures: Mapping[str, str],
    ) -> CardFacts:
        """Of a store, as it is read out."""
        manifest = snapshot.manifest
        experts: Sequence[Expert] = manifest.history
        weights, readout = None, "plain"
        if isinstance(reading, EntriesReading):
            weights = {expert.name: expert.weight for expert in reading.experts}
            experts = [entry for entry in experts if entry.name in weights]
        if isinstance(reading, EntriesReading | StateReading):
            readout = reading.readout.name
        about = shown(manifest.base.source, manifest.base.given), manifest.method, manifest.parameters, experts
        provenance = Provenance.of(snapshot.place, manifest, weights)
        return cls(*about, scale, distance, task, command, pictures, readout, weights, provenance)


def model_card(
    facts: CardFacts, hub_id: str | None = None, library: str = "transformers", pipeline: str | None = None
) -> str:
    """A README.md with the metadata that the hub understands; ``hub_id`` is the base's, where it has one.

    So is the ``pipeline``, the task that the hub offers it for, unless another head has been put in place."""
    task = [f"pipeline_tag: {pipeline}"] if pipeline and not facts.task else []
    origin = ["base_model:", f"- {json.dumps(hub_id)}", "base_model_relation: merge"] if hub_id else []
    parameters = markdown_text(", ".join(f"{key} = {value}" for key, value in facts.parameters.items())) or "none"
    lines = [
        *("---", f"library_name: {library}", *task, "tags:", "- merge", "- mergestream"),
        *origin,
        "---",
        "",
        f"# {counted(len(facts.experts), 'model')} merged with {markdown_text(facts.method)}",
        "",
        f"Merged one by one by mergestream {__version__}, without data or training.",
        "",
        f"* Base: {code(facts.base)}",
        f"* Method: {code(facts.method)}; parameters: {parameters}",
        *([f"* Readout: {code(facts.readout)}"] if facts.readout != "plain" else []),
        f"* {_scale(facts)}; distance to the base ‖merged − θ⁰‖ = {facts.distance:.6g}",
        *([f"* Head: the one of {code(facts.task)}"] if facts.task else []),
        "",
        f"| step | expert | digest | ‖Δ‖ | kept | {_multiplier(facts)} |",
        "|---|---|---|---|---|---|",
        *(_row(number, row, facts) for number, row in enumerate(facts.experts, 1)),
        "",
        f"kept: the share of the task vector's squared norm that {_kept_by(facts)}.",
        *facts.provenance.markdown(),
        *(line for file, words in facts.pictures.items() for line in ("", f"![{words}]({file})")),
        *(["", "Made with:", "", f"    {one_line(facts.command, COMMAND)}"] if facts.command else []),
        "",
    ]
    return "\n".join(lines)


def _kept_by(facts: CardFacts) -> str:
    return "the method let in" if facts.weights is None else "the ledger held when the expert came"


def _scale(facts: CardFacts) -> str:
    name, value = displayed_scale(facts.method, facts.scale)
    return f"Scale {facts.scale:.6g}" + (f" = 1/{name}, {name} = {value:.6g}" if value != facts.scale else "")


def _multiplier(facts: CardFacts) -> str:
    """What the last column of the experts has."""
    return displayed_scale(facts.method, facts.scale)[0] if facts.weights is None else "weight"


def _row(number: int, row: CardRow | Expert, facts: CardFacts) -> str:
    last = displayed_scale(facts.method, row.scale)[1] if facts.weights is None else facts.weights[row.name]
    return (
        f"| {number} | {markdown_text(row.name)} | {code(row.digest)} | {row.norm:.4g} | {row.kept:.1%} | {last:.4g} |"
    )
