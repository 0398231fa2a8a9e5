"""The inspect command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mergestream.cli.options import A_MODEL, ComputingOptions, StoredExpertOptions, WorkingStoreOptions, argument
from mergestream.cli.printing import answer, counts_text, print_table, say
from mergestream.methods.scale import displayed_scale
from mergestream.sizes import format_size

if TYPE_CHECKING:
    from mergestream.store.inspection import Inspection
    from mergestream.store.interference import Interference

HELP = "tell what adding an expert would do; changes nothing"
EXAMPLES = """
mergestream inspect store path/to/expert
mergestream inspect store path/to/expert --json
"""

MOST_LAYERS = 5
MOST_COLLIDING = 2
"""Layers that are named for each expert"""
MOST_TENSORS = 20
MOST_EXPERTS = 20


@dataclass(frozen=True)
class Options(WorkingStoreOptions, ComputingOptions, StoredExpertOptions):
    expert: str = argument(metavar="EXPERT", help=A_MODEL)


def run(options: Options) -> int:
    inspection = options.open_store().inspect(options.expert, **options.reading)
    answer(inspection.to_json())
    print_inspection(inspection)
    return 0


def print_inspection(inspection: Inspection) -> None:
    say(f"{inspection.source} would be step {inspection.step}")
    if inspection.duplicate_of:
        say(f"it has been absorbed already, as {inspection.duplicate_of}")
    say(f"tensors: {counts_text(inspection.fates)}")
    say(f"‖Δ‖ {inspection.norm:.4g}, {inspection.relative_norm:.2f} × the mean of the experts so far")
    say(_outcome(inspection))
    predicted = inspection.predicted
    say(
        f"time about {inspection.seconds:.1f} s (predicted {predicted.seconds:.1f} s, most of it "
        f"{predicted.bottleneck})   RAM for tensors {format_size(inspection.memory)}   "
        f"disk {format_size(inspection.disk)}"
    )
    if inspection.cosines:
        _print_cosines(inspection)
    if inspection.interference:
        _print_interference(inspection.interference)
    if inspection.kept < 1:
        _print_layers(inspection)
    _print_linear_weights(inspection)


def _print_cosines(inspection: Inspection) -> None:
    say()
    say("cosine to each expert, largest first:")
    known = [(name, value) for name, value in inspection.cosines.items() if value is not None]
    known.sort(key=lambda item: -item[1])
    print_table(("expert", "cosine"), ((name, f"{value:.3f}") for name, value in known[:MOST_EXPERTS]))
    _print_more(len(known) - MOST_EXPERTS)


def _outcome(inspection: Inspection) -> str:
    if inspection.scale is None or inspection.distance is None:
        return f"held {inspection.kept:.1%}"
    name, scale = displayed_scale(inspection.method, inspection.scale)
    return f"kept {inspection.kept:.1%}   {name} {scale:.4g}   distance to the base {inspection.distance:.4g}"


def _print_interference(found: Interference) -> None:
    say()
    say("predicted damage of each expert after adding it, and how much their inputs overlap with its own:")
    new = len(found.experts) - 1
    rows = []
    for number in sorted(range(new + 1), key=lambda expert: -(found.damage[expert] or 0))[:MOST_EXPERTS]:
        worst = list(found.of_pair(new, number).items())[:MOST_COLLIDING] if number != new else []
        overlap = found.overlap[new][number] if number != new else None
        where = ", ".join(f"{layer} {value:.2f}" for layer, value in worst)
        rows.append((found.experts[number], _shown(found.damage[number]), _shown(overlap), where or "-"))
    print_table(("expert", "damage", "overlap", "most in"), rows)
    _print_more(new + 1 - MOST_EXPERTS)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _print_layers(inspection: Inspection) -> None:
    held = inspection.interference is not None
    say()
    say("layers of which the least would be held:" if held else "layers with the most interference:")
    least = list(inspection.layers.items())[:MOST_LAYERS]
    print_table(("layer", "held" if held else "kept"), ((layer, f"{share:.1%}") for layer, share in least))


def _print_linear_weights(inspection: Inspection) -> None:
    linear = {name: tensor for name, tensor in inspection.tensors.items() if tensor.role == "linear"}
    if not linear:
        return
    held = inspection.interference is not None
    say()
    say(f"linear weights by what {'would be held' if held else 'survives'}, least first:")
    least = sorted(linear.items(), key=lambda item: (item[1].kept, item[0]))
    print_table(
        ("tensor", "held" if held else "kept", "‖Δ‖", "‖Δ‖/‖θ⁰‖", *(() if held else ("protected",))),
        (
            (
                *(name, f"{t.kept:.1%}", f"{t.norm:.4g}", f"{t.relative_norm:.2%}"),
                *(() if held else ("-" if t.protected is None else t.protected,)),
            )
            for name, t in least[:MOST_TENSORS]
        ),
    )
    _print_more(len(least) - MOST_TENSORS)


def _print_more(count: int) -> None:
    if count > 0:
        say(f"… and {count} more (--json lists all)")
