"""Read the merged model out of a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from torch import Tensor

from mergestream.checkpoints import TensorSpec
from mergestream.export.card import CardFacts, draw_pictures
from mergestream.export.directory import Output
from mergestream.merging.readout import Readout, cast

if TYPE_CHECKING:
    from mergestream.store import Store


def export(
    store: Store, output: Output, *, task: str | None = None, command: str | None = None, pictures: bool = True
) -> None:
    """Write ``merged = θ⁰ + scale · direction``; ``task`` names the expert whose head to put in place."""
    with ExitStack() as stack:
        state = stack.enter_context(closing(store.open_step()))
        base = stack.enter_context(store.open_base())
        heads = stack.enter_context(store.open_heads(task)) if task is not None else None
        manifest = store.manifest
        readout = Readout(manifest.base, base, store.method, manifest.step, store.history[-1].scale, state.read)
        forms: dict[str, TensorSpec] = {**manifest.base.tensors, **(heads.tensors if heads else {})}

        def pieces(name: str, dtype: str) -> Iterator[tuple[int, Tensor]]:
            if heads and name in heads.tensors:
                head = heads.read(name).reshape(-1)
                yield 0, cast(head, dtype, name) if head.is_floating_point() else head
            else:
                yield from readout.pieces(manifest.base.tensors[name].tied_to or name, dtype)

        output.refuse_to_replace(store.path, manifest.base.source)
        draft = stack.enter_context(output.draft())
        output.write_tensors(draft, forms, pieces, store.engine, store.progress)
        config = store.head_config(task) if task is not None else None
        drawn = draw_pictures(draft, store) if pictures else {}
        output.write_companions(draft, base, CardFacts.of(manifest, task, command, drawn), config)
