"""``mergestream inspect``: show what adding an expert would do, without changing the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mergestream.cli.options import MODEL, StoredExpertOptions, WorkingStoreOptions, argument, arguments_of
from mergestream.cli.printing import answer, counts_text, print_table, say
from mergestream.sizes import format_size

if TYPE_CHECKING:
    from mergestream.merging.interference import Interference
    from mergestream.store.inspect import Inspection


LAYERS_PER_EXPERT = 2
MOST_ROWS = 20


@dataclass(frozen=True)
class Inspect(WorkingStoreOptions, StoredExpertOptions):
    EXAMPLES = """
        mergestream inspect store path/to/expert
        mergestream inspect store path/to/expert --json
        """
    expert: str = argument("EXPERT", MODEL)

    def run(self) -> None:
        store = self.open_store()
        inspection = store.inspect(**arguments_of(store.inspect, self))
        answer(inspection.to_json())
        print_inspection(inspection)


def print_inspection(inspection: Inspection) -> None:
    """Print the result of a dry run."""
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
        worst = list(found.of_pair(new, number).items())[:LAYERS_PER_EXPERT] if number != new else []
        pair = (found.cosines[new][number], found.overlap[new][number]) if number != new else (None, None)
        where = ", ".join(f"{layer} {value:.2f}" for layer, value in worst)
        rows.append((found.experts[number], *map(_share_text, (found.damage[number], *pair)), where or "-"))
    print_table(("expert", "damage", "cosine", "overlap", "most in"), rows, most=MOST_ROWS)


def _share_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


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
