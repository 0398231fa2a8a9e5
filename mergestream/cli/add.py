"""The add command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergestream.cli.inspect import print_inspection
from mergestream.cli.log import entry_json
from mergestream.cli.options import (
    A_MODEL,
    ComputingOptions,
    GatedOptions,
    WorkingStoreOptions,
    argument,
    switch,
)
from mergestream.cli.printing import answer, say, with_notes
from mergestream.errors import UsageError
from mergestream.methods.scale import displayed_scale

if TYPE_CHECKING:
    from mergestream.api import Store
    from mergestream.store import Expert

HELP = "absorb experts, in the given order, each as a step of its own"
EXAMPLES = """
mergestream add store path/to/expert
mergestream add store experts/* --workers 4 --max-memory 8GB
mergestream add store path/to/expert --dry-run
mergestream add store path/to/classifier --heads 'classifier.*'
mergestream add store path/to/expert --gate 'kept>=0.6' --gate 'max_cosine<=0.5'
mergestream add store path/to/expert --gate 'damage<=0.3'    # of a ledger: predicted for every expert in it
mergestream add store path/to/expert --evaluate 'python score.py {model}' --gate 'score>=0.8'
mergestream add store path/to/expert --log wandb:my-project --log jsonl
"""


@dataclass(frozen=True)
class Options(WorkingStoreOptions, ComputingOptions, GatedOptions):
    experts: list[str] = argument(nargs="+", metavar="EXPERT", help=A_MODEL)
    name: str | None = argument("--name", help="how to call the expert (the last part of its path)")
    dry_run: bool = switch("--dry-run", "tell what would happen, change nothing (as inspect)")


def run(options: Options) -> int:
    told: list[dict[str, Any]] = []
    answer(told)  # now: those before a failing one are committed
    if options.name is not None and len(options.experts) > 1:
        raise UsageError("--name is for one expert, and several were given")
    store = options.open_store()
    for expert in options.experts:
        told.append(
            with_notes(_inspect(store, expert, options) if options.dry_run else _absorb(store, expert, options))
        )
    return 0


def _inspect(store: Store, expert: str, options: Options) -> dict[str, Any]:
    inspection = store.inspect(expert, **options.reading)
    print_inspection(inspection)
    return inspection.to_json()


def _absorb(store: Store, expert: str, options: Options) -> dict[str, Any]:
    entry = store.add(expert, options.name, **options.adding, log=options.log)
    print_step(store, entry)
    return entry_json(entry)


def print_step(store: Store, entry: Expert) -> None:
    name, scale = displayed_scale(store.manifest.method, entry.scale)
    outcome = f"held {entry.kept:.1%}" if entry.cut else f"kept {entry.kept:.1%}  {name} {scale:.4g}"
    say(f"step {store.manifest.step}: {entry.name}  ‖Δ‖ {entry.norm:.4g}  {outcome}  {entry.seconds:.1f} s")
