"""The log command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mergestream.cli.options import StoreOptions
from mergestream.cli.printing import answer, print_table, say
from mergestream.methods.scale import displayed_scale
from mergestream.report.harness import describe_evaluation

if TYPE_CHECKING:
    from mergestream.api import Store
    from mergestream.store import Expert

HELP = "list the absorbed experts"
EXAMPLES = "mergestream log store --json"

RENAMED = {"added": "time", "fates": "tensors"}
INTERNAL = ("direction_norm", "state", "record")

Options = StoreOptions


def run(options: Options) -> int:
    store = options.open_store()
    held = _held(store) if store.manifest.is_ledger else {}
    answer([entry_json(entry, held.get(entry.name)) for entry in store.history])
    if not store.history:
        say(f"{store.place} has absorbed nothing yet")
    elif store.manifest.is_ledger:
        _print_ledger(store.history, held)
    else:
        _print_steps(store.manifest.method, store.history)
    _print_notes(store.history)
    return 0


def _held(store: Store) -> dict[str, float]:
    """The share of each expert that its entry in a ledger holds now."""
    found = store.survival()
    return dict(zip(found.experts, found.total, strict=True))


def _print_ledger(history: Sequence[Expert], held: Mapping[str, float]) -> None:
    print_table(
        ("expert", "added", "digest", "step", "‖Δ‖", "held", "room for"),
        (
            (e.name, e.added, e.digest[:12], number, f"{e.norm:.4g}", f"{held[e.name]:.1%}", e.cut)
            for number, e in enumerate(history, 1)
        ),
        left=3,
    )


def _print_steps(method: str, history: Sequence[Expert]) -> None:
    told = [displayed_scale(method, entry.scale) for entry in history]
    print_table(
        ("expert", "added", "digest", "step", "‖Δ‖", "kept", told[0][0], "rank", "dropped"),
        (
            (
                *(e.name, e.added, e.digest[:12], number, f"{e.norm:.4g}", f"{e.kept:.1%}", f"{scale:.4g}"),
                *(e.rank or "-", f"{e.lost:.2%}" if e.lost else "-"),
            )
            for number, (e, (_, scale)) in enumerate(zip(history, told, strict=True), 1)
        ),
        left=3,
    )


def _print_notes(history: Sequence[Expert]) -> None:
    for entry in history:
        if entry.evaluation:
            say(f"score after {entry.name}: {describe_evaluation(entry.evaluation)}")
        for note in entry.notes:
            say(f"note on {entry.name}: {note}")


def entry_json(entry: Expert, held: float | None = None) -> dict[str, Any]:
    """An absorbed expert as one object, without what only the store itself needs; ``held`` is of a ledger."""
    facts = {RENAMED.get(name, name): value for name, value in asdict(entry).items() if name not in INTERNAL}
    if entry.cut:  # how a ledger is scaled is decided when it is read out
        return {**facts, "scale": None, "lambda": None, "held": entry.kept if held is None else held}
    return {**facts, "lambda": entry.lambda_}
