"""``mergestream log``: list the experts of a store in the order they were added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mergestream.cli.options import StoreOptions
from mergestream.cli.printing import answer, print_table, say

if TYPE_CHECKING:
    from mergestream.store import Expert
    from mergestream.store.store import Store


RENAMED = {"added": "time", "fates": "tensors"}
INTERNAL = ("direction_norm", "state", "record")


@dataclass(frozen=True)
class Log(StoreOptions):
    EXAMPLES = """
        mergestream log store
        mergestream log store --json
        """

    def run(self) -> None:
        store = self.open_store()
        held = _held_shares(store)
        removed = store.manifest.removed
        listed = [entry_json(entry, held.get(entry.name)) for entry in store.history]
        answer([*listed, *({**entry_json(removal.expert), "removed": removal.time} for removal in removed)])
        if not store.history:
            say(f"{store.storage} has no experts yet; add one with: mergestream add {store.storage} EXPERT")
        else:
            _print_experts(store.manifest.method, store.history, held)
        _print_notes(store.history)
        for removal in removed:
            say(f"removed: {removal.expert.name} ({removal.time}), added {removal.expert.added}")


def _held_shares(store: Store) -> dict[str, float]:
    """Measure the share of each expert that a ledger holds now; empty for other methods."""
    if not store.manifest.entries:
        return {}
    survival = store.survival()
    return dict(zip(survival.experts, survival.total, strict=True))


def _print_experts(method: str, history: Sequence[Expert], held: Mapping[str, float]) -> None:
    from mergestream.methods.scale import displayed_scale

    scale_name, _ = displayed_scale(method, 1.0)
    last = ("held", "slots") if held else ("kept", scale_name, "rank")
    rows = []
    for number, entry in enumerate(history, 1):
        share, scale = held.get(entry.name, entry.kept), displayed_scale(method, entry.scale)[1]
        others = (entry.cut,) if held else (f"{scale:.4g}", entry.rank or "-")
        rows.append((entry.name, entry.added, entry.digest[:12], number, f"{entry.norm:.4g}", f"{share:.1%}", *others))
    print_table(("expert", "added", "digest", "step", "‖Δ‖", *last), rows, left=3)


def _print_notes(history: Sequence[Expert]) -> None:
    from mergestream.report.harness import describe_evaluation

    for entry in history:
        if entry.evaluation:
            say(f"score after {entry.name}: {describe_evaluation(entry.evaluation)}")
        for note in entry.notes:
            say(f"note on {entry.name}: {note}")


def entry_json(entry: Expert, held: float | None = None) -> dict[str, Any]:
    """Convert an expert to JSON without internal fields; ``held`` is the share that a ledger holds now."""
    facts = {RENAMED.get(name, name): value for name, value in asdict(entry).items() if name not in INTERNAL}
    if entry.cut:  # in a ledger, which is scaled by its readout
        return {**facts, "scale": None, "lambda": None, "held": entry.kept if held is None else held}
    return {**facts, "lambda": entry.lambda_}
