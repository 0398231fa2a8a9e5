"""What a store remembers of each absorbed model, beside the state: ``experts/NNNN``."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints import SafetensorsWriter, TensorSpec, open_checkpoint
from mergestream.digest import tensor_digest, text_digest
from mergestream.errors import MergestreamError
from mergestream.experts.sketch import FORMAT, WIDTH, cosine
from mergestream.files import read_json, remove, sync_directory, sync_file, write_json

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mergestream.store.arrival import Arrival
    from mergestream.store.manifest import Expert

_NAME = "tensors.json"
HEADS = "heads.safetensors"
_SKETCH = "sketch"


def record_directory(store: Path, number: int) -> Path:
    """Where a store keeps what it must know of the expert of a step, beside the state."""
    return store / "experts" / f"{number:04d}"


def write_record(directory: Path, arrival: Arrival, sketch: Tensor) -> str:
    """Keep what happened to each tensor, the sketch and the expert's heads; returns the record's digest."""
    remove(directory)
    directory.mkdir(parents=True)
    vector, expert, config = arrival.vector, arrival.vector.expert, None
    if vector.heads:
        source = expert.directory / "config.json" if expert.directory else None
        config = read_json(source, finite=True) if source and source.is_file() else None
        layout = {name: expert.tensors[name] for name in vector.heads}
        with SafetensorsWriter(directory, layout, prefix="heads") as writer:
            for name in vector.heads:
                writer.write(name, expert.read(name))
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


def copy_record(directory: Path, target: Path) -> None:
    """The same record for the same expert under another number."""
    remove(target)
    shutil.copytree(directory, target)
    for path in target.iterdir():
        sync_file(path)
    sync_directory(target)
    sync_directory(target.parent)


def tensor_records(store: Path, number: int) -> dict[str, dict[str, Any]]:
    """What a step did to each tensor: ``norm``, ``kept`` (the share) and ``protected``."""
    return read_record(record_directory(store, number))["tensors"]


def read_record(directory: Path) -> dict[str, Any]:
    """``tensors``: norm, kept and protected of each; ``heads``; ``config``, where the expert has a head of its own."""
    return read_json(directory / _NAME)


def verify_record(directory: Path, digest: str) -> None:
    """Recompute the digests of the record, the sketch and the heads."""
    record = read_record(directory)
    if text_digest((directory / _NAME).read_text(encoding="utf-8")) != digest:
        raise MergestreamError(f"{directory / _NAME} is damaged: its digest does not match the manifest")
    for file, digests in (f"{_SKETCH}.safetensors", {_SKETCH: record["sketch"]}), (HEADS, record["heads"]):
        if not digests:
            continue
        with open_checkpoint(directory / file) as checkpoint:
            for name, expected in digests.items():
                if name not in checkpoint.tensors or tensor_digest(checkpoint.read(name)) != expected:
                    raise MergestreamError(f"{directory / file} is damaged: the digest of {name} does not match")


def write_sketch(directory: Path, values: Tensor) -> str:
    """Keep a sketch as ``sketch.safetensors``; returns its digest."""
    layout = {_SKETCH: TensorSpec("F16", (WIDTH,))}
    with SafetensorsWriter(directory, layout, prefix=_SKETCH, metadata={"sketch": FORMAT}) as writer:
        writer.write(_SKETCH, values)
    return tensor_digest(values)


def read_sketch(directory: Path) -> np.ndarray | None:
    """The sketch of an expert in float32, or None where none was kept."""
    import numpy as np
    from safetensors import SafetensorError, safe_open

    path = directory / f"{_SKETCH}.safetensors"
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            if (file.metadata() or {}).get("sketch") != FORMAT:
                raise MergestreamError(f"{path} is a sketch of another version of mergestream; upgrade mergestream")
            values: np.ndarray = file.get_tensor(_SKETCH)
    except (OSError, SafetensorError) as error:
        raise MergestreamError(f"{path} is damaged: {error}; restore it from a backup") from error
    return values.astype(np.float32)


def cosines_to(store: Path, history: Sequence[Expert], sketch: Tensor) -> dict[str, float | None]:
    """A task vector's cosine to that of each absorbed expert, by name."""
    new = sketch.float().numpy()
    return {entry.name: cosine(new, read_sketch(record_directory(store, entry.number))) for entry in history}
