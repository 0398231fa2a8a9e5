"""``mergestream add``: add experts to a store, each as one step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.cli.inspect import print_inspection
from mergestream.cli.log import entry_json
from mergestream.cli.options import (
    MODEL,
    GatedOptions,
    InputsOptions,
    WorkingStoreOptions,
    argument,
    arguments_of,
)
from mergestream.cli.printing import answer, say, with_notes
from mergestream.errors import UsageError

if TYPE_CHECKING:
    from mergestream.store import Expert
    from mergestream.store.store import Store


@dataclass(frozen=True)
class Add(WorkingStoreOptions, GatedOptions, InputsOptions):
    EXAMPLES = """
        mergestream add store path/to/expert
        mergestream add store legal=path/to/a medical=path/to/b
        mergestream add store experts/* --workers 4 --max-memory 8GB
        mergestream add store path/to/expert --dry-run
        mergestream add store path/to/classifier --heads 'classifier.*'
        mergestream add store path/to/expert --gate 'kept>=0.6' --gate 'relative_norm<=3'
        mergestream add store path/to/expert --gate 'damage<=0.3'    # ledger: predicted for every expert
        mergestream add store path/to/expert --evaluate 'python score.py {model}' --gate 'score>=0.8'
        mergestream add store path/to/expert --inputs prompts.jsonl    # unlabelled inputs, for a better merge
        mergestream add store path/to/expert --log wandb:my-project --log jsonl
        """
    experts: list[str] = argument("[NAME=]EXPERT", MODEL, nargs="+")
    name: str | None = argument("--name", "name of the expert (the last part of its path)")
    dry_run: bool = argument("--dry-run", "show what would happen without changing the store, like inspect")

    def run(self) -> None:
        results: list[dict[str, Any]] = []
        answer(results)  # before the first expert: if a later one fails, the earlier ones are committed
        if self.name is not None and len(self.experts) > 1:
            raise UsageError("--name is for one expert; write NAME=EXPERT to name several")
        if self.inputs is not None and len(self.experts) > 1:
            raise UsageError("--inputs are those of one expert; add the experts one by one")
        store = self.open_store()
        experts = [split_name(word) if self.name is None else (self.name, word) for word in self.experts]
        if len(experts) > 1 and not self.dry_run:
            from mergestream.store.add import check_experts

            check_experts(**arguments_of(check_experts, self, store=store, experts=experts))
        for name, expert in experts:
            result = _inspect(store, expert, self) if self.dry_run else _add(store, expert, name, self)
            results.append(with_notes(result))


def split_name(word: str) -> tuple[str | None, str]:
    """Split ``NAME=PATH``. A path that exists, or that has a slash before its first ``=``, has no name."""
    name, equals, path = word.partition("=")
    if not equals or "/" in name or Path(word).exists():
        return None, word
    return name, path


def _inspect(store: Store, expert: str, options: Add) -> dict[str, Any]:
    inspection = store.inspect(**arguments_of(store.inspect, options, expert=expert))
    print_inspection(inspection)
    return inspection.to_json()


def _add(store: Store, expert: str, name: str | None, options: Add) -> dict[str, Any]:
    entry = store.add(**arguments_of(store.add, options, expert=expert, name=name, inputs=options.make_inputs()))
    print_step(store, entry)
    return entry_json(entry)


def print_step(store: Store, entry: Expert) -> None:
    """Print one line on the expert that was just added."""
    from mergestream.methods.scale import displayed_scale

    name, scale = displayed_scale(store.manifest.method, entry.scale)
    outcome = f"held {entry.kept:.1%}" if entry.cut else f"kept {entry.kept:.1%}  {name} {scale:.4g}"
    say(f"step {store.manifest.step}: {entry.name}  ‖Δ‖ {entry.norm:.4g}  {outcome}  {entry.seconds:.1f} s")
