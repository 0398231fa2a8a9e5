"""From what a user names as an expert to its task vector: a full checkpoint, or an adapter of the base."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.checkpoints import Checkpoint, open_checkpoint
from mergestream.checkpoints.location import locate
from mergestream.checkpoints.opening import Source, open_located
from mergestream.experts.adapters import Adapter, find_adapter, open_adapter

if TYPE_CHECKING:
    from mergestream.base.model import BaseModel
    from mergestream.experts.vector import TaskVector
    from mergestream.experts.vocabulary import Vocab

ExpertSource = Source


def open_expert(source: ExpertSource) -> Checkpoint | Adapter:
    """Open a directory, a file, a hub id, a state dict or a module; a directory with an adapter's config is an
    adapter, and so are the weights in it."""
    if not isinstance(source, str | Path):
        return open_checkpoint(source)
    location = locate(source)
    adapter = find_adapter(location)
    return open_adapter(*adapter) if adapter else open_located(location)


def task_vector(
    model: BaseModel,
    base: Checkpoint,
    expert: Checkpoint | Adapter,
    *,
    partial: bool = False,
    ignore: Sequence[str] = (),
    vocab: Vocab | None = None,
) -> TaskVector:
    """The expert's difference from the base, checked against the base's headers, under the base's names."""
    from mergestream.experts.adapters.vector import AdapterVector
    from mergestream.experts.prefix import under_base_names
    from mergestream.experts.vector import TaskVector

    if isinstance(expert, Adapter):
        return AdapterVector(model, base, expert, ignore=ignore, vocab=vocab)
    expert, prefix = under_base_names(model, expert, ignore)
    return TaskVector(model, base, expert, partial=partial, ignore=ignore, prefix=prefix, vocab=vocab)
