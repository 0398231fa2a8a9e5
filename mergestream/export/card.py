"""The model card: what was merged and how, the history of the store, and the command."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream import __version__
from mergestream.checkpoints import Checkpoint
from mergestream.checkpoints.layout import model_config
from mergestream.checkpoints.location import public_name, without_revision
from mergestream.errors import MergestreamError
from mergestream.escaping import code, markdown_text, one_line
from mergestream.methods.scale import displayed_scale
from mergestream.sizes import counted
from mergestream.store.manifest import Expert, Manifest

if TYPE_CHECKING:
    from mergestream.export.labels import Labels
    from mergestream.merging.reading import Reading
    from mergestream.storage import Storage
    from mergestream.store.snapshot import Snapshot

MAX_COMMAND = 100_000
"""Characters of a command, which should be copied whole: it may name hundreds of experts"""


@dataclass(frozen=True)
class CardFacts:
    """The content of a model card."""

    manifest: Manifest
    scale: float
    """merged = θ⁰ + scale · direction"""
    distance: float
    """‖merged − θ⁰‖"""
    command: str | None = None
    task: str | None = None
    pictures: Mapping[str, str] = field(default_factory=dict)
    """Image files beside the card, with their captions"""
    reading: Reading | None = None
    """How the model was read out of a store"""
    removed: Sequence[str] = ()
    """Names of experts that were taken out of the store"""

    @cached_property
    def weights(self) -> Mapping[str, float] | None:
        """Weights of the selected experts; None if the method does not keep experts apart."""
        return self.reading.weights if self.reading else None

    @cached_property
    def experts(self) -> list[Expert]:
        """The experts in the model."""
        return [entry for entry in self.manifest.history if self.weights is None or entry.name in self.weights]


def model_card(facts: CardFacts, labels: Labels, hub_id: str | None = None) -> str:
    """A README.md with metadata for the hub; ``hub_id`` is the base's id on the hub, if it has one."""
    manifest, experts = facts.manifest, facts.experts
    readout = facts.reading.readout_name if facts.reading else "plain"
    pipeline = [f"pipeline_tag: {labels.pipeline}"] if labels.pipeline and not facts.task else []
    origin = ["base_model:", f"- {json.dumps(hub_id)}", "base_model_relation: merge"] if hub_id else []
    parameters = markdown_text(", ".join(f"{key} = {value}" for key, value in manifest.parameters.items())) or "none"
    name, value = displayed_scale(manifest.method, facts.scale)
    inverse = f" = 1/{name}, {name} = {value:.6g}" if value != facts.scale else ""
    keeper = "the method let in" if facts.weights is None else "the ledger held when the expert was added"
    lines = [
        *("---", f"library_name: {labels.library}", *pipeline, "tags:", "- merge", "- mergestream", *origin, "---"),
        *("", f"# {counted(len(experts), 'model')} merged with {markdown_text(manifest.method)}"),
        *("", f"Merged one by one by mergestream {__version__}, without data or training.", ""),
        f"* Base: {code(public_name(manifest.base.source, manifest.base.given))}",
        f"* Method: {code(manifest.method)}; parameters: {parameters}",
        *([f"* Readout: {code(readout)}"] if readout != "plain" else []),
        f"* Scale {facts.scale:.6g}{inverse}; distance to the base ‖merged − θ⁰‖ = {facts.distance:.6g}",
        *([f"* Head: from {code(facts.task)}"] if facts.task else []),
        "",
        f"| step | expert | digest | ‖Δ‖ | kept | {name if facts.weights is None else 'weight'} |",
        "|---|---|---|---|---|---|",
        *(_expert_row(number, entry, facts) for number, entry in enumerate(experts, 1)),
        *("", f"kept: the share of the task vector's squared norm that {keeper}."),
        *history_section(manifest, facts.removed, facts.weights),
        *(line for file, caption in facts.pictures.items() for line in ("", f"![{caption}]({file})")),
        *(["", "Made with:", "", f"    {one_line(facts.command, MAX_COMMAND)}"] if facts.command else []),
        "",
    ]
    return "\n".join(lines)


def _expert_row(number: int, entry: Expert, facts: CardFacts) -> str:
    weights, method = facts.weights, facts.manifest.method
    last = displayed_scale(method, entry.scale)[1] if weights is None else weights[entry.name]
    name, digest = markdown_text(entry.name), code(entry.digest)
    return f"| {number} | {name} | {digest} | {entry.norm:.4g} | {entry.kept:.1%} | {last:.4g} |"


def history_section(
    manifest: Manifest, removed: Sequence[str] = (), selected: Collection[str] | None = None
) -> list[str]:
    """Lines of a card: every expert that was added, from where, when and with which options."""
    if not manifest.history:
        return []
    return [
        *("", "## History", ""),
        "| added | expert | source | digest | ‖Δ‖ | kept | how |",
        "|---|---|---|---|---|---|---|",
        *(_history_row(entry, selected is None or entry.name in selected) for entry in manifest.history),
        *(["", f"Removed since: {markdown_text(', '.join(removed))}."] if removed else []),
    ]


def _history_row(entry: Expert, is_selected: bool) -> str:
    how = [_option_text(key, value) for key, value in entry.options.items() if value]
    how += [f"{gate['gate']} ({gate['value']:.4g})" for gate in entry.gates if gate["value"] is not None]
    how += [f"score {entry.score:.4g}"] if entry.score is not None else []
    how += [] if is_selected else ["left out of this model"]
    cells = [
        *(
            entry.added or "–",
            markdown_text(entry.name),
            code(public_name(entry.source, entry.given)),
            code(entry.digest),
        ),
        *(f"{entry.norm:.4g}", f"{entry.kept:.1%}", markdown_text(", ".join(how))),
    ]
    return f"| {' | '.join(cells)} |"


def _option_text(key: str, value: Any) -> str:
    """An option as it is typed on the command line."""
    flag = f"--{key.replace('_', '-')}"
    values = value if isinstance(value, list) else [value]
    return flag if value is True else " ".join(f"{flag} {each}" for each in values)


def removed_experts(store: Storage, manifest: Manifest) -> list[str]:
    """The names of experts that were taken out of a store, as far as it remembers them."""
    from mergestream.store.watched import recall

    removed = set[str]()
    with suppress(MergestreamError):  # nothing else depends on this file
        removed = {source for source, known in recall(store).items() if known.options is None}
    return sorted(Path(source).name for source in removed - {entry.source for entry in manifest.history})


def without_dates(snapshot: Snapshot) -> Snapshot:
    """A temporary store's snapshot without times, so that the card is the same on every run."""
    history = tuple(dataclasses.replace(entry, added="") for entry in snapshot.manifest.history)
    return dataclasses.replace(snapshot, manifest=dataclasses.replace(snapshot.manifest, history=history))


def hub_id(base: Checkpoint) -> str | None:
    """The base's id on the hub: its source, or the ``_name_or_path`` in its config."""
    source = without_revision(base.source)
    if not Path(base.source).exists() and source.count("/") == 1:
        return source
    remembered = str(model_config(base.directory).get("_name_or_path"))
    return remembered if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", remembered, re.ASCII) else None
