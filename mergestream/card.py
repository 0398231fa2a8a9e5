"""The model card: what was merged, how, and the command that makes it again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mergestream import __version__

if TYPE_CHECKING:
    from mergestream.store import Store


def model_card(store: Store, *, task: str | None = None, command: str | None = None) -> str:
    """A README.md with the metadata that the hub understands."""
    manifest = store.manifest
    last = manifest.history[-1]
    base = manifest.base.source
    hub_id = base.split("@")[0] if "/" in base and not base.startswith(("/", ".")) else None
    metadata = ["---", "library_name: transformers", "tags:", "- merge", "- mergestream"]
    if hub_id:
        metadata += ["base_model:", f"- {json.dumps(hub_id)}", "base_model_relation: merge"]
    metadata.append("---")
    parameters = ", ".join(f"{key} = {value}" for key, value in manifest.parameters.items()) or "none"
    rows = [
        f"| {number} | {_cell(entry.name)} | `{entry.digest}` | {entry.norm:.4g} | {entry.kept:.1%} | {entry.lambda_:.4g} |"
        for number, entry in enumerate(manifest.history, 1)
    ]
    lines = [
        *metadata,
        "",
        f"# {manifest.step} models merged with {manifest.method}",
        "",
        f"Merged one by one by mergestream {__version__}, without data or training.",
        "",
        f"* Base: `{base}` (digest `{manifest.base.digest}`)",
        f"* Method: `{manifest.method}`; parameters: {parameters}",
        f"* λ = {last.lambda_:.6g}; distance to the base ‖merged − θ⁰‖ = {last.distance:.6g}",
        *([f"* Head: the one of `{task}`"] if task else []),
        "",
        "| step | expert | digest | ‖Δ‖ | kept | λ |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        "kept: the share of the task vector's squared norm that the method let in.",
        *(["", "Made with:", "", f"    {command}"] if command else []),
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
