"""From what a user names as an expert to its task vector: a full checkpoint, or an adapter of the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.checkpoints import Checkpoint, open_checkpoint
from mergestream.checkpoints.opening import is_hub_id, open_directory
from mergestream.experts.adapters import Adapter, adapter_directory, is_adapter, open_adapter

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.base.model import BaseModel
    from mergestream.experts.vector import TaskVector

ExpertSource = str | Path | Mapping[str, "Tensor"]


def open_expert(source: ExpertSource) -> Checkpoint | Adapter:
    """Open a directory, a file, a hub id or a state dict; a directory with an adapter's config is an adapter, and so
    are the weights in it."""
    if isinstance(source, Mapping):
        return open_checkpoint(source)
    path = Path(source).expanduser()
    if adapter := adapter_directory(path):
        return open_adapter(adapter.resolve())
    if not path.exists() and is_hub_id(source):
        from mergestream.checkpoints.hub import download

        directory, resolved = download(str(source))
        return open_adapter(directory, resolved) if is_adapter(directory) else open_directory(directory, resolved)
    return open_checkpoint(source)


def task_vector(
    model: BaseModel,
    base: Checkpoint,
    expert: Checkpoint | Adapter,
    *,
    partial: bool = False,
    ignore: Sequence[str] = (),
) -> TaskVector:
    """The expert's difference from the base, checked against the base's headers."""
    from mergestream.experts.adapters.vector import AdapterVector
    from mergestream.experts.vector import TaskVector

    if isinstance(expert, Adapter):
        return AdapterVector(model, base, expert, ignore=ignore)
    return TaskVector(model, base, expert, partial=partial, ignore=ignore)
