"""What the hub is told of a merged model: the library that loads it and the task that it is for, those of its base."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from mergestream.checkpoints import Checkpoint
from mergestream.checkpoints.layout import CARD, MODULES, model_config

_LONGEST_FRONT = 10_000


class Labels(NamedTuple):
    library: str
    pipeline: str | None


def labels(base: Checkpoint, of_other_class: bool = False) -> Labels:
    """By the card of the base, or else by what is in its directory; a task's model ``of_other_class`` is for others."""
    if of_other_class:
        return Labels("transformers", None)
    inferred = _inferred(base.directory)
    front = front_matter(base.directory / CARD) if base.directory else []
    return Labels(_field("library_name", front) or inferred.library, _field("pipeline_tag", front) or inferred.pipeline)


def front_matter(card: Path) -> list[str]:
    """The lines of a card's metadata, which are YAML; none where it has none, or is not there."""
    if not card.is_file():
        return []
    with card.open(encoding="utf-8", errors="replace") as file:
        front, closed, _ = file.read(_LONGEST_FRONT).partition("\n---\n")
    return front.splitlines() if closed and front.startswith("---\n") else []


def _inferred(directory: Path | None) -> Labels:
    if directory and (directory / MODULES).is_file():
        return Labels("sentence-transformers", "sentence-similarity")
    if "_diffusers_version" in model_config(directory):
        return Labels("diffusers", None)
    return Labels("transformers", None)


def _field(name: str, front: list[str]) -> str | None:
    """A field that is one word; whatever else may be there is not looked at."""
    found = (re.fullmatch(rf"{name}: *[\"']?([\w.-]+)[\"']? *", line, re.ASCII) for line in front)
    return next((match[1] for match in found if match), None)
