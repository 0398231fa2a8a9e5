"""``mergestream diff``: compare two steps of a store, or a step and a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mergestream.cli.options import WorkingStoreOptions, argument
from mergestream.cli.printing import answer, print_table, say

MOST_LAYERS = 20


@dataclass(frozen=True)
class Diff(WorkingStoreOptions):
    EXAMPLES = """
        mergestream diff store 3 4
        mergestream diff store 0 4
        mergestream diff store 4 path/to/expert
        """
    a: str = argument("A", "a step number (0 is the base), or a checkpoint")
    b: str = argument("B", "the same, for the second model")

    def run(self) -> None:
        from mergestream.report.diff import compare

        found = compare(self.open_store(), self.a, self.b)
        answer(asdict(found))
        total = found.total
        say(f"A: {found.a}, ‖A − base‖ {total.norm_a:.6g}")
        say(f"B: {found.b}, ‖B − base‖ {total.norm_b:.6g}")
        say(f"‖A − B‖ {total.distance:.6g}   cosine of A − base and B − base {_cosine_text(total.cosine)}")
        say()
        say("layers with the largest differences:")
        print_table(
            ("layer", "‖A − B‖", "share", "‖A − base‖", "‖B − base‖", "cosine"),
            (
                (
                    *(layer, f"{one.distance:.4g}"),
                    f"{one.distance**2 / total.distance**2:.1%}" if total.distance else "-",
                    *(f"{one.norm_a:.4g}", f"{one.norm_b:.4g}", _cosine_text(one.cosine)),
                )
                for layer, one in found.layers.items()
            ),
            most=MOST_LAYERS,
        )


def _cosine_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
