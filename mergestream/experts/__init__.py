"""Experts: open a fine-tuned model or an adapter, and compute its task vector Δ = θ − θ⁰."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mergestream.base.model import BaseModel
from mergestream.base.names import are_adapter_names
from mergestream.checkpoints import Checkpoint, open_checkpoint
from mergestream.checkpoints.location import locate
from mergestream.checkpoints.reader import Source, open_located
from mergestream.experts.adapters.adapter import Adapter, BoundAdapter, find_adapter, open_adapter
from mergestream.experts.adapters.single_file import open_lora_file
from mergestream.experts.names import under_base_names
from mergestream.experts.vector import TaskVector
from mergestream.experts.vocabulary import Vocab

ExpertSource = Source


def open_expert(source: ExpertSource) -> Checkpoint | Adapter:
    """Open a directory, file, hub id, state dict or module; a directory with an adapter config is an adapter."""
    if not isinstance(source, str | Path):
        return open_checkpoint(source)
    location = locate(source)
    adapter = find_adapter(location)
    return open_adapter(adapter) if adapter else open_located(location)


def make_task_vector(
    model: BaseModel,
    base: Checkpoint,
    expert: Checkpoint | Adapter,
    *,
    partial: bool = False,
    ignore: Sequence[str] = (),
    vocab: Vocab | None = None,
) -> TaskVector:
    """The expert's difference from the base, under the base's names; headers are checked, no weight is read."""
    if isinstance(expert, Checkpoint) and are_adapter_names(expert.tensors):
        expert = open_lora_file(expert, model, base.directory)
    if isinstance(expert, Adapter):
        return TaskVector(model, base, BoundAdapter(expert, model, base), partial=True, ignore=ignore, vocab=vocab)
    expert, prefix = under_base_names(model, expert, ignore)
    return TaskVector(model, base, expert, partial=partial, ignore=ignore, prefix=prefix, vocab=vocab)
