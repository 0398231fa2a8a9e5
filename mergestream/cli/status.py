"""``mergestream init``, ``status`` and ``log``: create a store, show its state and list its experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mergestream.cli.options import MethodOptions, RunningOptions, StoreOptions, argument, arguments_of
from mergestream.cli.printing import answer, counts_text, print_table, say
from mergestream.sizes import counted, format_size

if TYPE_CHECKING:
    from mergestream.store import Expert
    from mergestream.store.store import Store

RENAMED = {"added": "time", "fates": "tensors"}
INTERNAL = ("direction_norm", "state", "record")


@dataclass(frozen=True)
class Init(MethodOptions, RunningOptions):
    EXAMPLES = """
        mergestream init store --base path/to/base
        mergestream init store --base org/model@main --method ties --set density=0.1 --set mode=streaming
        mergestream init store --base bert --heads 'classifier.*' --not-linear '*.pooler.*'
        mergestream init s3://bucket/store --base s3://models/llama
        mergestream init store --base org/model --config-only    # for adapters only
        """
    store: str = argument("STORE", "the new store: a directory or s3://BUCKET/PATH")
    heads: list[str] = argument("--heads GLOB", "tensors to keep per expert instead of merging them")
    keep: int = argument("--keep N", "earlier steps to keep for undo (1)", type=int, default=1)
    verbose: bool = argument("--verbose", "with --json: list every tensor, as status does")
    config_only: bool = argument("--config-only", "fetch the base's weights only when they are needed")

    def run(self) -> None:
        from mergestream.store.store import Store

        made = {"path": self.store, "method": self.make_method(), **self.running}
        store = Store.create(**arguments_of(Store.create, self, **made))
        status = status_json(store)
        if not self.verbose:
            del status["tensors"]
        answer(status)
        say(f"{store.storage}: {store.manifest.method_text} on {store.manifest.base.source}")
        say(f"tensors: {counts_text(status['counts'], status['matrices'])}")
        say(f"next: mergestream add {store.storage} EXPERT …")


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
        say(f"tensors: {counts_text(status['counts'], status['matrices'])}")
        if manifest.history:
            last = manifest.history[-1]
            say(_ledger_text(status) if status["ledger"] else _scale_text(manifest.method, last))
            say(f"last: {last.name} ({last.added})")
        if self.tensors:
            say()
            keys = ("name", "role", "rule", "dtype")
            rows = (
                [*(one[key] for key in keys), "×".join(map(str, one["shape"])) or "scalar"] for one in status["tensors"]
            )
            print_table(("tensor", "role", "rule", "dtype", "shape"), rows, left=4)


def _scale_text(method: str, last: Expert) -> str:
    from mergestream.methods.scale import displayed_scale

    distance = "" if last.distance is None else f"   distance to the base {last.distance:.6g}"
    name, value = displayed_scale(method, last.scale)
    return f"{name} {value:.6g}   mean ‖Δ‖ {last.mean_norm:.6g}{distance}"


def _ledger_text(status: Mapping[str, Any]) -> str:
    ledger = status["ledger"]
    inputs = f"inputs {format_size(ledger['inputs_bytes'])}   " if ledger["inputs_bytes"] else ""
    return (
        f"{counted(status['step'], 'expert')} in {counted(ledger['room_for'], 'slot')}   mean ‖Δ‖ {status['n']:.6g}   "
        f"entries {format_size(ledger['bytes'])}   {inputs}budget {ledger['budget']:g}"
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
        "matrices": manifest.base.matrices,
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


@dataclass(frozen=True)
class Log(StoreOptions):
    EXAMPLES = """
        mergestream log store
        mergestream log store --json
        """

    def run(self) -> None:
        store = self.open_store()
        manifest, history, held = store.manifest, store.history, dict[str, float]()
        if manifest.entries:
            survival = store.survival()
            held = dict(zip(survival.experts, survival.total, strict=True))
        listed = [entry_json(entry, held.get(entry.name)) for entry in history]
        answer([*listed, *({**entry_json(removal.expert), "removed": removal.time} for removal in manifest.removed)])
        if history:
            _print_experts(manifest.method, history, held)
        else:
            say(f"{store.storage} has no experts yet; add one with: mergestream add {store.storage} EXPERT")
        for entry in history:
            if entry.evaluation:
                from mergestream.report.scores import describe_evaluation

                say(f"score after {entry.name}: {describe_evaluation(entry.evaluation)}")
            for note in entry.notes:
                say(f"note on {entry.name}: {note}")
        for removal in manifest.removed:
            say(f"removed: {removal.expert.name} ({removal.time}), added {removal.expert.added}")


def _print_experts(method: str, history: Sequence[Expert], held: Mapping[str, float]) -> None:
    """Print a table of the experts; ``held`` is the share of each that a ledger holds now."""
    from mergestream.methods.scale import displayed_scale

    scale_name, _ = displayed_scale(method, 1.0)
    last = ("held", "slots") if held else ("kept", scale_name, "rank")
    rows = []
    for number, entry in enumerate(history, 1):
        share, scale = held.get(entry.name, entry.kept), displayed_scale(method, entry.scale)[1]
        others = (entry.cut,) if held else (f"{scale:.4g}", entry.rank or "-")
        rows.append((entry.name, entry.added, entry.digest[:12], number, f"{entry.norm:.4g}", f"{share:.1%}", *others))
    print_table(("expert", "added", "digest", "step", "‖Δ‖", *last), rows, left=3)


def entry_json(entry: Expert, held: float | None = None) -> dict[str, Any]:
    """Convert an expert to JSON without internal fields; ``held`` is the share that a ledger holds now."""
    facts = {RENAMED.get(name, name): value for name, value in asdict(entry).items() if name not in INTERNAL}
    if entry.cut:  # in a ledger, which is scaled by its readout
        return {**facts, "scale": None, "lambda": None, "held": entry.kept if held is None else held}
    return {**facts, "lambda": entry.lambda_}
