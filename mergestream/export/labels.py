"""Labels for the hub, from the base: the library that loads the model, and its task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from mergestream.checkpoints import Checkpoint
from mergestream.checkpoints.layout import CARD, MODULES, model_config

_MAX_FRONT_MATTER = 10_000


class Labels(NamedTuple):
    """The fields ``library_name`` and ``pipeline_tag`` of a card."""

    library: str = "transformers"
    pipeline: str | None = None


def labels(base: Checkpoint, is_other_class: bool = False) -> Labels:
    """Read them from the base's card or infer them from its files; a model of another class has transformers' own."""
    if is_other_class or base.directory is None:
        return Labels()
    library, pipeline = Labels("diffusers" if "_diffusers_version" in model_config(base.directory) else "transformers")
    if (base.directory / MODULES).is_file():
        library, pipeline = "sentence-transformers", "sentence-similarity"
    lines = _front_matter(base.directory / CARD)
    return Labels(_field("library_name", lines) or library, _field("pipeline_tag", lines) or pipeline)


def _front_matter(card: Path) -> list[str]:
    """The lines of a card's YAML metadata; empty if it has none."""
    if not card.is_file():
        return []
    with card.open(encoding="utf-8", errors="replace") as file:
        text, end, _ = file.read(_MAX_FRONT_MATTER).partition("\n---\n")
    return text.splitlines() if end and text.startswith("---\n") else []


def _field(name: str, lines: list[str]) -> str | None:
    """The value of a field, if it is a single word."""
    found = (re.fullmatch(rf"{name}: *[\"']?([\w.-]+)[\"']? *", line, re.ASCII) for line in lines)
    return next((match[1] for match in found if match), None)
