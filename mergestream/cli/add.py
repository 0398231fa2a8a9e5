"""``mergestream add`` and ``mergestream inspect``: add experts to a store, or show what adding one would do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.cli.options import (
    MODEL,
    GatedOptions,
    InputsOptions,
    StoredExpertOptions,
    WorkingStoreOptions,
    argument,
    arguments_of,
)
from mergestream.cli.printing import answer, counts_text, print_table, say, with_notes
from mergestream.cli.status import entry_json
from mergestream.errors import UsageError
from mergestream.sizes import format_size

if TYPE_CHECKING:
    from mergestream.merging.interference import Interference
    from mergestream.store import Expert
    from mergestream.store.inspect import Inspection
    from mergestream.store.store import Store

LAYERS_PER_EXPERT = 2
MOST_ROWS = 20


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
            if self.dry_run:
                result = inspect_expert(store, self, expert)
            else:
                options = arguments_of(store.add, self, expert=expert, name=name, inputs=self.make_inputs())
                entry = store.add(**options)
                print_step(store, entry)
                result = entry_json(entry)
            results.append(with_notes(result))


def split_name(word: str) -> tuple[str | None, str]:
    """Split ``NAME=PATH``. A path that exists, or that has a slash before its first ``=``, has no name."""
    name, _, path = word.partition("=")
    return (None, word) if not path or "/" in name or Path(word).exists() else (name, path)


def print_step(store: Store, entry: Expert) -> None:
    """Print one line on the expert that was just added."""
    from mergestream.methods.scale import displayed_scale

    name, scale = displayed_scale(store.manifest.method, entry.scale)
    outcome = f"held {entry.kept:.1%}" if entry.cut else f"kept {entry.kept:.1%}  {name} {scale:.4g}"
    say(f"step {store.manifest.step}: {entry.name}  ‖Δ‖ {entry.norm:.4g}  {outcome}  {entry.seconds:.1f} s")


@dataclass(frozen=True)
class Inspect(WorkingStoreOptions, StoredExpertOptions):
    EXAMPLES = """
        mergestream inspect store path/to/expert
        mergestream inspect store path/to/expert --json
        """
    expert: str = argument("EXPERT", MODEL)

    def run(self) -> None:
        answer(inspect_expert(self.open_store(), self, self.expert))


def inspect_expert(store: Store, options: Add | Inspect, expert: str) -> dict[str, Any]:
    """Print what adding an expert would do; returns the same as JSON."""
    inspection = store.inspect(**arguments_of(store.inspect, options, expert=expert))
    say(f"{inspection.source} would be step {inspection.step}")
    if inspection.duplicate_of:
        say(f"the store already contains it as {inspection.duplicate_of}")
    say(f"tensors: {counts_text(inspection.fates)}")
    say(f"‖Δ‖ {inspection.norm:.4g}, {inspection.relative_norm:.2f} × the mean of the experts so far")
    say(_outcome(inspection))
    say(
        f"time about {inspection.seconds:.1f} s   RAM for tensors {format_size(inspection.memory)}   "
        f"disk {format_size(inspection.disk)}"
    )
    if inspection.interference:
        _print_interference(inspection.interference)
    _print_linear_weights(inspection)
    return inspection.to_json()


def _outcome(inspection: Inspection) -> str:
    from mergestream.methods.scale import displayed_scale

    if inspection.scale is None or inspection.distance is None:
        return f"held {inspection.kept:.1%}"
    name, scale = displayed_scale(inspection.method, inspection.scale)
    return f"kept {inspection.kept:.1%}   {name} {scale:.4g}   distance to the base {inspection.distance:.4g}"


def _print_interference(found: Interference) -> None:
    say()
    say("predicted damage to each expert after the step, its cosine to the new expert, and the overlap of inputs:")
    new = len(found.experts) - 1
    rows = []
    for number in sorted(range(new + 1), key=lambda expert: -(found.damage[expert] or 0)):
        cosine = overlap = None
        where = "-"
        if number != new:
            cosine, overlap = found.cosines[new][number], found.overlap[new][number]
            worst = list(found.of_pair(new, number).items())[:LAYERS_PER_EXPERT]
            where = ", ".join(f"{layer} {value:.2f}" for layer, value in worst) or "-"
        shares = ("-" if value is None else f"{value:.3f}" for value in (found.damage[number], cosine, overlap))
        rows.append((found.experts[number], *shares, where))
    print_table(("expert", "damage", "cosine", "overlap", "most in"), rows, most=MOST_ROWS)


def _print_linear_weights(inspection: Inspection) -> None:
    linear = [(name, tensor) for name, tensor in inspection.tensors.items() if tensor.role == "linear"]
    if not linear:
        return
    linear.sort(key=lambda item: (item[1].kept, item[0]))
    share = "held" if inspection.interference else "kept"
    say()
    say(f"linear weights with the smallest share {share}:")
    rows = [(name, f"{t.kept:.1%}", f"{t.norm:.4g}", f"{t.relative_norm:.2%}") for name, t in linear]
    print_table(("tensor", share, "‖Δ‖", "‖Δ‖/‖θ⁰‖"), rows, most=MOST_ROWS)
