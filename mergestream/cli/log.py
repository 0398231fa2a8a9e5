"""The log command."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mergestream.cli.options import StoreOptions, switch
from mergestream.cli.printing import print_json, print_table

if TYPE_CHECKING:
    from mergestream.store import Expert

HELP = "list the absorbed experts"
EXAMPLES = "mergestream log store --json"

RENAMED = {"added": "time", "fates": "tensors"}
INTERNAL = ("scale", "direction_norm", "state", "record")


@dataclass(frozen=True)
class Options(StoreOptions):
    json: bool = switch("--json", "a JSON list, one object per expert")


def run(options: Options) -> int:
    store = options.open_store()
    if options.json:
        print_json([entry_json(entry) for entry in store.history])
        return 0
    if not store.history:
        print(f"{store.path} has absorbed nothing yet")
        return 0
    print_table(
        ("expert", "added", "digest", "step", "‖Δ‖", "kept", "λ", "rank", "dropped"),
        (
            (
                *(e.name, e.added, e.digest[:12], number, f"{e.norm:.4g}", f"{e.kept:.1%}", f"{e.lambda_:.4g}"),
                *(e.rank or "-", f"{e.lost:.2%}" if e.lost else "-"),
            )
            for number, e in enumerate(store.history, 1)
        ),
        left=3,
    )
    return 0


def entry_json(entry: Expert) -> dict[str, Any]:
    """An absorbed expert as one object, without what only the store itself needs."""
    facts = {RENAMED.get(name, name): value for name, value in asdict(entry).items() if name not in INTERNAL}
    return {**facts, "lambda": entry.lambda_}
