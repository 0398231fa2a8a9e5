"""What a store remembers of each absorbed model, beside the state: ``experts/NNNN``."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from mergestream.checkpoints import SafetensorsWriter, TensorSpec
from mergestream.digest import tensor_digest, text_digest
from mergestream.engine import Engine
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.config import AdapterConfig
from mergestream.experts.names import Prefix
from mergestream.experts.sketch import FORMAT, READABLE, WIDTH, cosines
from mergestream.experts.vocabulary import ROWS, Token
from mergestream.files import read_json, remove, sync_directory, sync_file, write_json
from mergestream.schema import Count, Magnitude, damaged, invalid_file, parse, read_text, validate
from mergestream.store.checked import CheckedTensors
from mergestream.store.mirror import SKETCH, Mirror, Place, fetched, located, publish

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mergestream.store.arrival import Arrival
    from mergestream.store.manifest import Expert

_NAME = "tensors.json"
HEADS = "heads.safetensors"
_SKETCH = "sketch"


def record_folder(folder: str) -> str:
    """Where a store keeps what it must know of the expert of a step, beside the state."""
    return f"experts/{folder}"


def write_record(store: Place, folder: str, arrival: Arrival, sketch: Tensor) -> str:
    """Keep what happened to each tensor, the sketch and the expert's heads; returns the record's digest."""
    directory = store / record_folder(folder)
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
        "adapter": vector.adapter_config,
        "prefix": asdict(vector.prefix),
        "tokens": [asdict(token) for token in vector.tokens],
        "tensors": {
            name: {"norm": math.sqrt(outcome.norm2), "kept": outcome.kept, "protected": outcome.protected}
            for name, outcome in ((name, arrival.outcomes[name]) for name in vector.names)
        },
    }
    write_json(directory / _NAME, record)
    publish(store, record_folder(folder))
    return text_digest((directory / _NAME).read_text(encoding="utf-8"))


def copy_record(store: Place, folder: str, to: str) -> None:
    """The same record for the same expert under another number."""
    if isinstance(store, Mirror):
        return store.copy(record_folder(folder), record_folder(to))
    target = store / record_folder(to)
    remove(target)
    shutil.copytree(store / record_folder(folder), target)
    for path in target.iterdir():
        sync_file(path)
    sync_directory(target)
    sync_directory(target.parent)


def drop_record(store: Place, folder: str) -> None:
    """Of an expert that is not to come after all: why not is what counts, and the next writer tries again."""
    with suppress(OSError, MergestreamError):
        if isinstance(store, Mirror):
            store.remove([record_folder(folder)])
        else:
            remove(store / record_folder(folder))


class TensorRecord(TypedDict):
    """What a step did to one tensor."""

    norm: Magnitude
    kept: Magnitude
    """The share of ‖Δ‖² that entered the state"""
    protected: Count | None


class _Record(TypedDict):
    sketch: str
    """Its digest"""
    heads: dict[str, str]
    """Those of the tensors that stay with it"""
    config: dict[str, Any] | None
    """Its own, where such tensors are: the labels are in it"""
    tokens: list[Token]
    """Those that it has and the base has not, where their rows stay with it; older records lack it"""
    tensors: dict[str, TensorRecord]


class Record(_Record, total=False):
    """What is remembered of an expert."""

    adapter: AdapterConfig | None
    """What its configuration tells, of an adapter; older stores lack it"""
    prefix: Prefix
    """By which its names differ from the base's; older stores lack it"""


@dataclass(frozen=True)
class Task:
    """What it takes to make an expert's model of the merged one."""

    heads: CheckedTensors
    """The tensors that stay with the expert, open"""
    config: dict[str, Any] | None
    """None where the expert came without"""
    prefix: Prefix


def read_record(store: Place, expert: Expert) -> Record:
    path = fetched(store, record_folder(expert.folder)) / _NAME
    text = read_text(path)
    if text_digest(text) != expert.record:
        raise damaged(path, "its digest does not match the manifest")
    return validate({"tokens": [], **parse(text, path)}, Record, path)


def tensor_records(store: Place, expert: Expert, names: Collection[str]) -> dict[str, TensorRecord]:
    """What the step of an expert did to each of these tensors."""
    found = read_record(store, expert)["tensors"]
    if missing := set(names) - found.keys():
        raise invalid_file(store / record_folder(expert.folder) / _NAME, f"it says nothing of {min(missing)}")
    return found


def has_task(store: Place, expert: Expert) -> bool:
    """Whether there are tensors that were kept for an expert."""
    return bool(expert.fates.get("head") and read_record(store, expert)["heads"])


def open_task(store: Place, expert: Expert) -> Task | None:
    """The tensors that were kept for an expert, if there are any, and what goes with them."""
    record = read_record(store, expert)
    if not record["heads"]:
        return None
    files, count = located(store, record_folder(expert.folder)).file(HEADS), len(record["tokens"])
    heads = CheckedTensors(files, record["heads"])
    for name, info in heads.tensors.items():
        if name.startswith(ROWS) and info.shape[:1] != (count,):
            raise invalid_file(files.path, f"{name} has the shape {list(info.shape)}, and there are {count} tokens")
    return Task(heads, record["config"], record.get("prefix", Prefix()))


def verify_record(store: Place, expert: Expert, engine: Engine) -> None:
    """Recompute the digests of the record, the sketch and the heads."""
    read_sketch(store, expert)
    if task := open_task(store, expert):
        with task.heads:
            list(task.heads.verify(engine))


def write_sketch(directory: Path, values: Tensor) -> str:
    """Keep a sketch as ``sketch.safetensors``; returns its digest."""
    layout = {_SKETCH: TensorSpec("F16", tuple(values.shape))}
    with SafetensorsWriter(directory, layout, prefix=_SKETCH, metadata={"sketch": FORMAT}) as writer:
        writer.write(_SKETCH, values)
    return tensor_digest(values)


def read_sketch(store: Place, expert: Expert) -> np.ndarray:
    """The sketch of an expert in float16, as it is kept."""
    path = fetched(store, record_folder(expert.folder)) / SKETCH
    return load_sketch(path, read_record(store, expert)["sketch"])


def load_sketch(path: Path, digest: str) -> np.ndarray:
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            if (file.metadata() or {}).get("sketch") not in READABLE:
                raise MergestreamError(f"{path} is a sketch of another version of mergestream; upgrade mergestream")
            values: np.ndarray = file.get_tensor(_SKETCH)
    except (OSError, SafetensorError) as error:
        raise damaged(path, str(error)) from error
    if tensor_digest(torch.from_numpy(values)) != digest:
        raise damaged(path, f"the digest of {_SKETCH} does not match")
    if values.ndim != 1 or values.dtype != "float16" or WIDTH % max(values.size, 1):
        raise invalid_file(path, "it is no sketch")
    return values


def cosines_to(store: Place, history: Sequence[Expert], sketch: Tensor) -> dict[str, float | None]:
    """A task vector's cosine to that of each absorbed expert, by name."""
    new, names = sketch.numpy(), [entry.name for entry in history]
    found = (cosines([new, read_sketch(store, entry)])[0][1] for entry in history)
    return dict(zip(names, found, strict=True))
