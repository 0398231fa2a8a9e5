"""Records of the experts of a store, ``experts/NNNN``: facts per tensor, settings, and heads."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from mergestream.checkpoints import SafetensorsWriter
from mergestream.checkpoints.settings import Settings, read_settings
from mergestream.digest import text_digest
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.config import AdapterConfig
from mergestream.experts.names import Prefix
from mergestream.experts.vocabulary import ROWS, Token
from mergestream.files import read_json, to_json, write_text
from mergestream.schema import Count, Magnitude, invalid_file
from mergestream.storage import Storage
from mergestream.store.tensors import CheckedTensors, read_checked

if TYPE_CHECKING:
    from mergestream.store.add import Candidate
    from mergestream.store.expert import Expert

_NAME = "tensors.json"


class TensorRecord(TypedDict):
    """The facts of a step about one tensor."""

    norm: Magnitude
    kept: Magnitude
    """The share of ‖Δ‖² that entered the state"""
    protected: Count | None


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of an expert, ``tensors.json``; older stores lack the fields that have a default."""

    heads: dict[str, str]
    """The digests of the heads that were kept"""
    config: dict[str, Any] | None
    """The expert's config, which has the labels of its heads; None if it has no heads or no config"""
    adapter: AdapterConfig | None = None
    """The configuration of an adapter"""
    prefix: Prefix = field(default_factory=Prefix)
    """The prefix that tensor names of the expert have and the base's lack"""
    absent: list[str] = field(default_factory=list)
    """Tensors of the base that the expert's class does not have"""
    tokens: list[Token] = field(default_factory=list)
    """Tokens that only the expert has, if their rows were kept"""
    settings: Settings = field(default_factory=dict)
    """Chat template, special tokens and generation settings"""
    tensors: dict[str, TensorRecord]


@dataclass(frozen=True)
class Task:
    """The heads of an expert, which turn the merged model into a model for its task."""

    heads: CheckedTensors
    config: dict[str, Any] | None
    """The expert's config, if it has one"""
    prefix: Prefix
    absent: list[str]
    """Tensors of the base that the expert's class does not have"""


def record_folder(folder: str) -> str:
    """The folder of the record that belongs to a step."""
    return f"experts/{folder}"


def write_record(storage: Storage, folder: str, candidate: Candidate) -> str:
    """Write the facts per tensor and the expert's heads; returns the record's digest."""
    vector, expert, config = candidate.vector, candidate.vector.expert, None
    with storage.drafting(record_folder(folder)) as directory:
        if vector.heads:
            source = expert.directory / "config.json" if expert.directory else None
            config = read_json(source, finite=True) if source and source.is_file() else None
            layout = {name: expert.tensors[name] for name in vector.heads}
            with SafetensorsWriter(directory, layout, prefix="heads") as writer:
                for name in vector.heads:
                    writer.write(name, expert.read(name))
        tensors: dict[str, TensorRecord] = {}
        for name in vector.names:
            outcome = candidate.outcomes[name]
            facts = TensorRecord(norm=math.sqrt(outcome.norm2), kept=outcome.kept, protected=outcome.protected)
            tensors[name] = facts
        record = Record(
            heads={name: vector.digests[name] for name in vector.heads},
            config=config,
            adapter=vector.adapter.config.inherited if vector.adapter else None,
            prefix=vector.prefix,
            absent=vector.absent,
            tokens=list(vector.tokens),
            settings=read_settings(expert.directory),
            tensors=tensors,
        )
        text = to_json(asdict(record))
        write_text(directory / _NAME, text)
    return text_digest(text)


def copy_record(storage: Storage, folder: str, to: str) -> None:
    """Give the same expert the same record under another number."""
    source, target = record_folder(folder), record_folder(to)
    storage.remove(target)
    for name in storage.files(source):
        storage.copy(f"{source}/{name}", f"{target}/{name}")
    storage.sync(target)
    storage.sync("experts")


def drop_record(storage: Storage, folder: str) -> None:
    """Remove the record of an expert that was not added. A failure is ignored: the next writer cleans up."""
    with suppress(OSError, MergestreamError):
        storage.remove(record_folder(folder))
        storage.remove(f"inputs/{folder}")


def read_record(storage: Storage, expert: Expert) -> Record:
    """The record of an expert, checked against the digest in the manifest."""
    return read_checked(storage, f"{record_folder(expert.folder)}/{_NAME}", Record, expert.record)


def tensor_records(storage: Storage, expert: Expert, names: Collection[str]) -> dict[str, TensorRecord]:
    """The facts of an expert's step about these tensors."""
    found = read_record(storage, expert).tensors
    if missing := set(names) - found.keys():
        where = f"{storage}/{record_folder(expert.folder)}/{_NAME}"
        raise invalid_file(where, f"it says nothing about {min(missing)}")
    return found


def open_task(storage: Storage, expert: Expert) -> Task | None:
    """The heads that were kept for an expert, if there are any, with its config."""
    record = read_record(storage, expert)
    if not record.heads:
        return None
    folder, count = record_folder(expert.folder), len(record.tokens)
    heads = CheckedTensors(storage, folder, "heads", record.heads)
    for name, info in heads.tensors.items():
        if name.startswith(ROWS) and info.shape[:1] != (count,):
            where, shape = f"{storage}/{folder}/heads.safetensors", list(info.shape)
            raise invalid_file(where, f"{name} has the shape {shape}, but there are {count} tokens")
    return Task(heads, record.config, record.prefix, record.absent)
