"""``mergestream status``: show the state of a store and the role of each tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergestream.cli.options import StoreOptions, argument
from mergestream.cli.printing import answer, counts_text, print_table, say
from mergestream.sizes import counted, format_size

if TYPE_CHECKING:
    from mergestream.store import Expert
    from mergestream.store.manifest import Manifest
    from mergestream.store.store import Store


@dataclass(frozen=True)
class Status(StoreOptions):
    EXAMPLES = """
        mergestream status store
        mergestream status store --tensors
        mergestream status store --json
        """
    tensors: bool = argument("--tensors", "list every tensor with its role and the rule that decided it")

    def run(self) -> None:
        store = self.open_store()
        status = status_json(store)
        answer(status)
        manifest = store.manifest
        if manifest.adapters:  # else no library of tensors is loaded
            with store.snapshot() as snapshot:
                if shortfall := snapshot.shortfall():
                    store.progress.note(shortfall)
        say(f"{store.storage}: {manifest.summary}")
        say(f"base: {manifest.base.source}")
        say(f"tensors: {counts_text(status['counts'])}")
        if manifest.history:
            last = manifest.history[-1]
            say(_ledger_text(manifest, status["ledger"]) if status["ledger"] else _scale_text(manifest.method, last))
            say(f"last: {last.name} ({last.added})")
        if self.tensors:
            say()
            _print_tensors(manifest)


def _scale_text(method: str, last: Expert) -> str:
    from mergestream.methods.scale import displayed_scale

    distance = "" if last.distance is None else f"   distance to the base {last.distance:.6g}"
    name, value = displayed_scale(method, last.scale)
    return f"{name} {value:.6g}   mean ‖Δ‖ {last.mean_norm:.6g}{distance}"


def _ledger_text(manifest: Manifest, ledger: Mapping[str, Any]) -> str:
    inputs = f"inputs {format_size(ledger['inputs_bytes'])}   " if ledger["inputs_bytes"] else ""
    return (
        f"{counted(manifest.step, 'expert')} in {counted(ledger['room_for'], 'slot')}   "
        f"mean ‖Δ‖ {manifest.history[-1].mean_norm:.6g}   "
        f"entries {format_size(ledger['bytes'])}   {inputs}budget {ledger['budget']:g}"
    )


def _print_tensors(manifest: Manifest) -> None:
    print_table(
        ("tensor", "role", "rule", "dtype", "shape"),
        (
            (name, tensor.role, tensor.rule, tensor.dtype, "×".join(map(str, tensor.shape)) or "scalar")
            for name, tensor in manifest.base.tensors.items()
        ),
        left=4,
    )


def status_json(store: Store) -> dict[str, Any]:
    """Describe the store as JSON; equal stores give equal JSON."""
    manifest = store.manifest
    last = manifest.history[-1] if manifest.history else None
    ledger = _ledger_json(store)
    scaled = None if ledger else last  # a ledger is scaled by its readout
    return {
        "step": manifest.step,
        "method": manifest.method,
        "parameters": manifest.parameters,
        "base": {"source": manifest.base.source, "digest": manifest.base.digest},
        "scale": scaled.scale if scaled else None,
        "lambda": scaled.lambda_ if scaled else None,
        "n": last.mean_norm if last else None,
        "distance": last.distance if last else 0.0,
        "ledger": ledger,
        "experts": manifest.names,
        "keep": manifest.keep,
        "rank": last.rank if last else 0,
        "heads": manifest.base.heads,
        "counts": dict(sorted(Counter(tensor.role for tensor in manifest.base.tensors.values()).items())),
        "tensors": [
            {"name": name, **{key: getattr(tensor, key) for key in ("dtype", "shape", "role", "rule", "tied_to")}}
            for name, tensor in manifest.base.tensors.items()
        ],
    }


def _ledger_json(store: Store) -> dict[str, Any] | None:
    """Describe how a ledger's budget is divided: slots for experts, bytes of all entries."""
    from mergestream.storage import total_bytes

    manifest = store.manifest
    if not manifest.is_ledger:
        return None
    taken = sum(total_bytes(store.storage.files(f"steps/{entry.folder}")) for entry in manifest.history)
    return {
        "room_for": manifest.sharing,
        "bytes": taken,
        "inputs_bytes": total_bytes(store.storage.files("inputs")),
        "budget": manifest.parameters["budget"],
    }
