"""What a store remembers of each absorbed model, beside the state: ``experts/NNNN``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints import SafetensorsWriter, open_checkpoint
from mergestream.digest import tensor_digest, text_digest
from mergestream.errors import MergestreamError
from mergestream.files import read_json, remove, sync_directory, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.store.arrival import Arrival

_NAME = "tensors.json"
HEADS = "heads.safetensors"


def write_record(directory: Path, arrival: Arrival, sketch: Tensor) -> str:
    """Keep what happened to each tensor, the sketch and the expert's heads; returns the record's digest."""
    from mergestream.experts.sketch import write_sketch

    remove(directory)
    directory.mkdir(parents=True)
    vector, config = arrival.vector, None
    if vector.heads:
        source = vector.expert.directory / "config.json" if vector.expert.directory else None
        config = read_json(source) if source and source.is_file() else None
        layout = {name: vector.expert.tensors[name] for name in vector.heads}
        with SafetensorsWriter(directory, layout, prefix="heads") as writer:
            for name in vector.heads:
                writer.write(name, vector.expert.read(name))
    record = {
        "sketch": write_sketch(directory, sketch),
        "heads": {name: vector.digests[name] for name in vector.heads},
        "config": config,
        "tensors": {
            name: {"norm": math.sqrt(outcome.norm2), "kept": outcome.kept, "protected": outcome.protected}
            for name, outcome in ((name, arrival.outcomes[name]) for name in vector.names)
        },
    }
    write_json(directory / _NAME, record)
    sync_directory(directory.parent)
    return text_digest((directory / _NAME).read_text(encoding="utf-8"))


def read_record(directory: Path) -> dict[str, Any]:
    """``tensors``: norm, kept and protected of each; ``heads``; ``config``, where the expert has a head of its own."""
    record: dict[str, Any] = read_json(directory / _NAME)
    return record


def verify_record(directory: Path, digest: str) -> None:
    """Recompute the digests of the record, the sketch and the heads."""
    record = read_record(directory)
    if text_digest((directory / _NAME).read_text(encoding="utf-8")) != digest:
        raise MergestreamError(f"{directory / _NAME} is damaged: its digest does not match the manifest")
    recorded = {"sketch.safetensors": {"sketch": record["sketch"]}}
    if record["heads"]:
        recorded[HEADS] = record["heads"]
    for file, digests in recorded.items():
        with open_checkpoint(directory / file) as checkpoint:
            for name, expected in digests.items():
                if name not in checkpoint.tensors or tensor_digest(checkpoint.read(name)) != expected:
                    raise MergestreamError(f"{directory / file} is damaged: the digest of {name} does not match")
