"""Common architectures, known without transformers, which takes seconds to import.

``known_architectures.json`` lists the tensors of each class; ``tests/base/known_architectures.py`` writes it.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.base.architecture import Architecture, Slot, load_architecture
from mergestream.checkpoints.layout import model_config
from mergestream.errors import MergestreamError

if TYPE_CHECKING:
    from mergestream.checkpoints import Checkpoint


def find_architecture(checkpoint: Checkpoint) -> Architecture:
    """The architecture of a checkpoint: from the list if its class has all stored tensors, else from transformers."""
    try:
        config = model_config(checkpoint.directory)
        name = config["architectures"][0]
        known = _known_architectures()[name]
    except (MergestreamError, LookupError, TypeError):  # transformers says what is wrong
        return load_architecture(checkpoint.directory)
    kinds = {pattern: kind.split(" ") for kind, patterns in known["slots"].items() for pattern in patterns}
    prefix = f"{known['prefix']}."

    def slot_of(name: str) -> str | None:
        spellings = (name, prefix + name, name.removeprefix(prefix))
        return next((spelling for spelling in spellings if pattern_of(spelling) in kinds), None)

    is_tied = config.get("tie_word_embeddings", known["tied_by_default"])
    ties = tuple(map(tuple, known["ties" if is_tied else "untied"]))
    slots = {}
    for slot in (*map(slot_of, checkpoint.tensors), *(slot for group in ties for slot in group)):
        if slot is None:
            return load_architecture(checkpoint.directory)
        kind, module = kinds[pattern_of(slot)]
        leaf = slot.rpartition(".")[2]
        slots[slot] = Slot(module, module, kind) if leaf == "weight" else Slot(f"{leaf} of {module}", None, kind)
    return Architecture(name, slots, ties, slot_of)


def pattern_of(name: str) -> str:
    """A tensor's name with ``#`` for the numbers of layers."""
    return re.sub(r"\.\d+(?=\.)", ".#", name)


@cache
def _known_architectures() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(__file__).with_name("known_architectures.json").read_text("utf-8"))
    return content
