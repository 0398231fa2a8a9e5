"""The status command."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergestream.cli.options import StoreOptions, switch
from mergestream.cli.printing import answer, counts_text, print_table, say
from mergestream.methods.scale import displayed_scale
from mergestream.sizes import counted, format_size

if TYPE_CHECKING:
    from mergestream.api import Store
    from mergestream.store import Expert

HELP = "show what a store holds, and what each tensor is"
EXAMPLES = """
mergestream status store
mergestream status store --tensors
mergestream status store --json
"""


@dataclass(frozen=True)
class Options(StoreOptions):
    tensors: bool = switch("--tensors", "list every tensor with its role and rule")


def run(options: Options) -> int:
    store = options.open_store()
    answer(status_json(store))
    _print_status(store)
    if options.tensors:
        say()
        _print_tensors(store)
    return 0


def _print_status(store: Store) -> None:
    say(f"{store.place}: {store.manifest.told}")
    say(f"base: {store.manifest.base.source}")
    say(f"tensors: {roles_text(store)}")
    if store.history:
        last = store.history[-1]
        say(_room_text(store) if store.manifest.is_ledger else _scale_text(store.manifest.method, last))
        say(f"last: {last.name} ({last.added})")
        if (last.rank or last.lost) and not store.manifest.is_ledger:
            say(_ranks_text(store))


def _scale_text(method: str, last: Expert) -> str:
    distance = "" if last.distance is None else f"   distance to the base {last.distance:.6g}"
    name, value = displayed_scale(method, last.scale)
    return f"{name} {value:.6g}   n {last.mean_norm:.6g}{distance}"


def _room_text(store: Store) -> str:
    """Of a ledger: how many experts share its room, and what that takes."""
    room = _room_json(store)
    return (
        f"{counted(store.manifest.step, 'expert')} in room for {room['room_for']}   "
        f"n {store.history[-1].mean_norm:.6g}   entries {format_size(room['bytes'])}   budget {room['budget']:g}"
    )


def _room_json(store: Store) -> dict[str, Any]:
    from mergestream.store.steps import step_bytes

    manifest = store.manifest
    taken = sum(step_bytes(store.place, entry.folder) for entry in manifest.history)
    return {"room_for": manifest.sharing, "bytes": taken, "budget": manifest.parameters["budget"]}


def _ranks_text(store: Store) -> str:
    """How large the factors are, and what bounding them has cost so far."""
    bound = f", bounded by {store.manifest.max_rank}" if store.manifest.max_rank else ""
    lost = [entry for entry in store.history if entry.lost]
    steps = counted(len(lost), "step")
    cost = f"; {steps} dropped up to {max(e.lost for e in lost):.2%} of the energy" if lost else ""
    return f"in factors of rank {store.history[-1].rank} at most{bound}{cost}"


def _print_tensors(store: Store) -> None:
    print_table(
        ("tensor", "role", "rule", "dtype", "shape"),
        (
            (name, tensor.role, tensor.rule, tensor.dtype, "×".join(map(str, tensor.shape)) or "scalar")
            for name, tensor in store.manifest.base.tensors.items()
        ),
        left=4,
    )


def roles_text(store: Store) -> str:
    """``6 linear, 4 other``"""
    return counts_text(_counts(store))


def _counts(store: Store) -> Counter[str]:
    return Counter(tensor.role for tensor in store.manifest.base.tensors.values())


def status_json(store: Store) -> dict[str, Any]:
    """The store as one object, nothing in it volatile."""
    manifest = store.manifest
    last = manifest.history[-1] if manifest.history else None
    return {
        "step": manifest.step,
        "method": manifest.method,
        "parameters": manifest.parameters,
        "base": {"source": manifest.base.source, "digest": manifest.base.digest},
        "scale": last.scale if last and not manifest.is_ledger else None,
        "lambda": last.lambda_ if last and not manifest.is_ledger else None,
        "n": last.mean_norm if last else None,
        "distance": last.distance if last else 0.0,
        "ledger": _room_json(store) if manifest.is_ledger else None,
        "experts": manifest.names,
        "keep": manifest.keep,
        "max_rank": manifest.max_rank,
        "rank": last.rank if last else 0,
        "lost": [entry.lost for entry in manifest.history],
        "heads": manifest.base.heads,
        "counts": dict(sorted(_counts(store).items())),
        "tensors": [
            {"name": name, **{key: getattr(tensor, key) for key in ("dtype", "shape", "role", "rule", "tied_to")}}
            for name, tensor in manifest.base.tensors.items()
        ],
    }
