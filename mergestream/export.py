"""Write the merged model as a directory that ``from_pretrained`` loads."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mergestream.card import model_card
from mergestream.checkpoints import Checkpoint, SafetensorsWriter, TensorSpec
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.errors import MergestreamError, UsageError
from mergestream.readout import Readout, cast
from mergestream.store.files import sync_directory, write_text

if TYPE_CHECKING:
    from mergestream.store import Store

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}

COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "merges.txt", "*.spm")
"""Configuration, tokenizer and generation files; weights and the base's own model card stay behind."""


def export(
    store: Store,
    out: Path,
    *,
    dtype: str | None = None,
    task: str | None = None,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    command: str | None = None,
) -> Path:
    """Write ``merged = θ⁰ + scale · direction`` to a new directory, rounded once, to ``dtype`` (the base's by default).

    ``task`` puts the head of that expert in place of the base's. All is written beside ``out`` and
    renamed, so that there is never a partial model, nor an old file in a new one.
    """
    if not store.history:
        raise MergestreamError(f"{store.path} has absorbed nothing yet; add an expert first")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    with directory_in_place(out, overwrite) as draft, closing(store.open_step()) as state, store.open_base() as base:
        entry = store.history[-1]
        readout = Readout(store.manifest.base, base, store.method, store.manifest.step, entry.scale, state.read)
        heads = store.open_heads(task) if task is not None else None
        write_model(store, draft, readout, heads, DTYPES.get(dtype or ""), max_shard_size)
        copy_companions(base, draft)
        write_text(draft / "README.md", model_card(store, task=task, command=command))
    return out


def write_model(
    store: Store,
    out: Path,
    readout: Readout,
    heads: Checkpoint | None,
    dtype: str | None,
    max_shard_size: int,
) -> None:
    """Stream every tensor from base and state to its place in the output, several at a time."""
    model = readout.model
    kept = dict(heads.tensors) if heads else {}
    forms: dict[str, TensorSpec] = {**model.tensors, **kept}
    layout = {
        name: TensorSpec(dtype if dtype and spec.is_float else spec.dtype, spec.shape) for name, spec in forms.items()
    }

    def write(name: str) -> None:
        for start, piece in _pieces(name):
            writer.write_piece(name, start, piece)

    def _pieces(name: str) -> Iterator[tuple[int, Tensor]]:
        if heads and name in kept:
            head = heads.read(name).reshape(-1)
            yield 0, cast(head, layout[name].dtype, name) if head.is_floating_point() else head
        else:
            yield from readout.pieces(model.tensors[name].tied_to or name, layout[name].dtype)

    costs = {name: spec.nbytes for name, spec in layout.items()}
    with (
        SafetensorsWriter(out, layout, max_shard_size=max_shard_size) as writer,
        store.progress.task("exporting", sum(costs.values())) as advance,
    ):
        for name, _ in store.engine.run(costs, write):
            advance(costs[name])


def copy_companions(base: Checkpoint, out: Path) -> None:
    """Copy config, tokenizer and generation files from the base's directory."""
    if base.directory is None:
        return
    for pattern in COMPANIONS:
        for path in sorted(base.directory.glob(pattern)):
            if path.is_file() and not path.name.endswith(".index.json"):
                shutil.copyfile(path, out / path.name)


@contextmanager
def directory_in_place(out: Path, overwrite: bool) -> Iterator[Path]:
    """A directory beside ``out`` that takes its place when all has gone well."""
    if out.exists() and not overwrite:
        raise MergestreamError(f"{out} exists already; pass --overwrite to replace it, or choose another place")
    if out.exists() and not out.is_dir():
        raise MergestreamError(f"{out} is a file, not a directory; choose another place")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_drafts(out)
        draft = Path(tempfile.mkdtemp(prefix=_draft_prefix(out), dir=out.parent))
        draft.chmod(0o755)
    except OSError as error:
        raise MergestreamError(f"{out} cannot be written: {error.strerror}") from error
    try:
        yield draft
        sync_directory(draft)
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=_draft_prefix(out), dir=out.parent))
            out.rename(old / out.name)
            draft.rename(out)
            shutil.rmtree(old)
        else:
            draft.rename(out)
        sync_directory(out.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _draft_prefix(out: Path) -> str:
    return f".{out.name}.mergestream-"


def remove_drafts(out: Path) -> None:
    """Remove what a killed export to the same place has left behind."""
    for path in out.parent.glob(f"{_draft_prefix(out)}*"):
        shutil.rmtree(path, ignore_errors=True)
