"""The model card: what was merged and how, the history of the store, and the command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mergestream import __version__
from mergestream.checkpoints import Checkpoint
from mergestream.checkpoints.layout import MODULES, model_config
from mergestream.checkpoints.location import hub_name, public_name
from mergestream.escaping import code, markdown_table, markdown_text, one_line
from mergestream.methods.scale import displayed_scale
from mergestream.sizes import counted
from mergestream.store.expert import Expert
from mergestream.store.manifest import Manifest

if TYPE_CHECKING:
    from mergestream.merging.reading import Reading

MAX_COMMAND = 100_000
"""Characters of a command, which should be copied whole: it may name hundreds of experts"""


def model_card(
    manifest: Manifest,
    scale: float,
    distance: float,
    *,
    command: str | None = None,
    task: str | None = None,
    reading: Reading | None = None,
    base_is_merged: bool = False,
    settings: str = "",
    library: str = "transformers",
    hub_id: str | None = None,
) -> str:
    """A README.md with metadata for the hub: the library that loads the model, and the base's id on the hub.

    ``distance`` is ‖merged − θ⁰‖. A model from a store has a ``reading``. With ``base_is_merged`` the base is one of
    the merged models, so that the merge has no base in the usual sense. ``settings`` says in Markdown where the chat
    template, special tokens and generation settings are from, if not all from the base.
    """
    weights, readout = (reading.weights, reading.readout.name) if reading else (None, "plain")
    count = len(manifest.history if weights is None else weights)
    origins = [hub_id, *(hub_name(entry.source) for entry in manifest.history if base_is_merged)]
    ids = [f"- {json.dumps(name)}" for name in dict.fromkeys(filter(None, origins))]
    origin = ["base_model:", *ids, "base_model_relation: merge"] if ids else []
    base = code(public_name(manifest.base.source, manifest.base.given))
    parameters = markdown_text(", ".join(f"{key} = {value}" for key, value in manifest.parameters.items())) or "none"
    name, value = displayed_scale(manifest.method, scale)
    inverse = f" = 1/{name}, {name} = {value:.6g}" if value != scale else ""
    return card_text(
        [f"library_name: {library}", "tags:", "- merge", "- mergestream", *origin],
        f"{counted(count, 'model')} merged with {markdown_text(manifest.method)}",
        f"Merged by mergestream {__version__}, without training.",
        "",
        f"* Base: none; config, tokenizer and θ⁰ are those of {base}" if base_is_merged else f"* Base: {base}",
        f"* Method: {code(manifest.method)}; parameters: {parameters}",
        *([f"* Readout: {code(readout)}"] if readout != "plain" else []),
        f"* Scale {scale:.6g}{inverse}; distance to the base ‖merged − θ⁰‖ = {distance:.6g}",
        *([f"* Head: from {code(task)}"] if task else []),
        *([f"* Settings: {settings}"] if settings else []),
        *history_section(manifest, weights),
        command=command,
    )


def card_text(metadata: Sequence[str], title: str, *lines: str, command: str | None = None) -> str:
    """A README.md: YAML for the hub, the lines, and the command that made it."""
    made_with = ["", "Made with:", "", f"    {one_line(command, MAX_COMMAND)}"] if command else []
    return "\n".join(["---", *metadata, "---", "", f"# {title}", "", *lines, *made_with, ""])


def history_section(manifest: Manifest, weights: Mapping[str, float] | None = None) -> list[str]:
    """Lines of a card: every expert that was added, from where, when, with which options and which weight.

    In a ledger, ``weights`` are those of the experts that are in the model; by default all count equally.
    """
    if not manifest.history:
        return []
    factors: Mapping[str, float]
    if manifest.is_ledger:
        factor, keeper = "weight", "the ledger held when the expert was added"
        factors = dict.fromkeys(manifest.names, 1.0) if weights is None else weights
    else:
        factor, keeper = displayed_scale(manifest.method, 1)[0], "the method let in"
        factors = {entry.name: displayed_scale(manifest.method, entry.scale)[1] for entry in manifest.history}
    headings = ("step", "expert", "source", "digest", "added", "‖Δ‖", "kept", factor, "how")
    rows = (_history_row(number, entry, factors.get(entry.name)) for number, entry in enumerate(manifest.history, 1))
    explained = f"kept: the share of the task vector's squared norm that {keeper}."
    return ["", "## History", "", *markdown_table(headings, rows), "", explained]


def _history_row(number: int, entry: Expert, factor: float | None) -> list[str]:
    """A row with the expert's weight or the scale after it; None where it is left out."""
    how = [_option_text(key, value) for key, value in entry.options.items() if value]
    how += [f"{gate['gate']} ({gate['value']:.4g})" for gate in entry.gates if gate["value"] is not None]
    how += [f"score {entry.score:.4g}"] if entry.score is not None else []
    how += [] if factor is not None else ["left out of this model"]
    return [
        *(str(number), markdown_text(entry.name), code(public_name(entry.source, entry.given)), code(entry.digest)),
        *(entry.added or "–", f"{entry.norm:.4g}", f"{entry.kept:.1%}", "–" if factor is None else f"{factor:.4g}"),
        markdown_text(", ".join(how)),
    ]


def _option_text(key: str, value: Any) -> str:
    """An option as it is typed on the command line."""
    flag = f"--{key.replace('_', '-')}"
    values = value if isinstance(value, list) else [value]
    return flag if value is True else " ".join(f"{flag} {each}" for each in values)


def library_of(base: Checkpoint) -> str:
    """The library that loads the base, by its files."""
    if base.directory is not None and (base.directory / MODULES).is_file():
        return "sentence-transformers"
    return "diffusers" if "_diffusers_version" in model_config(base.directory) else "transformers"


def hub_id(base: Checkpoint) -> str | None:
    """The base's id on the hub: its source, or the ``_name_or_path`` in its config."""
    return hub_name(base.source) or hub_name(str(model_config(base.directory).get("_name_or_path")))
