"""Tables and figure of the ledger's results, from the output of the commands in ``protocol.md``.

    python -m benchmarks.ledger_results docs/results/ledger

Reads these files if they exist: DIR/SUITE-TASKS/results.json (ACC, the worst task, costs), forgetting/results.json in
the same directory (BWT, retention), and beside each orders-N/results.json (methods that were run in N orders). Writes
DIR/tables.md and, if `vision` is among the suites, DIR/accuracy-over-models.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mergestream.escaping import markdown_table as table
from mergestream.evaluation.results import Results, Spread
from mergestream.evaluation.rows import Row
from mergestream.evaluation.tables import plain
from mergestream.files import write_text

NAMES = {
    "average": "average",
    "task_arithmetic:scale=0.3": "task arithmetic, 0.3",
    "task_arithmetic:scale=0.5": "task arithmetic, 0.5",
    "ties": "TIES, continual",
    "ties:mode=streaming:scale=1.0": "TIES, all at once",
    "magmax": "MagMax",
    "opcm": "OPCM (reference)",
    "opcm:projection=block": "OPCM (block)",
    "opcm:scaling=sqrt": "OPCM (λ = √t)",
    "opcm@iso": "OPCM, read out by iso",
    "average@iso": "Iso-C",
    "ledger@iso": "ledger, `iso`",
    "ledger@tsv": "TSV-M (ledger, `tsv`)",
    "ledger@tempered": "ledger, `tempered`",
    "ledger@agree": "ledger, `agree`",
    "ledger": "**ledger, by default** (`agree`; for adapters `tempered`)",
    "ledger@agree+balance": "ledger, `agree --balance`",
    "ledger@tempered+balance": "ledger, `tempered --balance`",
}
"""Rows of the tables, in order; ``+balance`` was an option of version 0.2"""
READ_BACK = "ledger@expert"
CURVES = {"ledger": "ledger (agree)", "opcm": "OPCM", "average": "average", "ties:mode=streaming:scale=1.0": "TIES"}
SUITES = ("vision", "text", "vision-lora", "text-lora", "text-base", "language", "language-tiny")
PERPLEXITY = "perplexity"

Line = tuple[str, Callable[["Proof"], str]]


@dataclass(frozen=True)
class Proof:
    """The results of one suite with some number of tasks."""

    suite: str
    tasks: int
    results: Results
    forgetting: Results | None

    @property
    def title(self) -> str:
        return f"{self.suite} {self.tasks}"

    def mean(self, known: dict[str, float]) -> float:
        return sum(known[task] for task in self.results.tasks) / self.tasks

    @property
    def with_choices(self) -> list[str]:
        """Tasks with a choice of answers; the others have free answers."""
        told = self.results.settings.get("protocol", {}).get("choices", {})
        return [task for task in self.results.tasks if task in told]

    def narrowed(self, tasks: Sequence[str]) -> Proof:
        """Return the same streams, restricted to some tasks."""
        runs = [replace(run, order=[task for task in run.order if task in tasks]) for run in self.results.runs]
        return replace(self, tasks=len(tasks), results=replace(self.results, tasks=list(tasks), runs=runs))


def find(directory: Path) -> list[Proof]:
    """Load all results, by suite and number of tasks."""
    found = []
    for path in directory.glob("*/results.json"):
        suite, _, tasks = path.parent.name.rpartition("-")
        beside = path.parent / "forgetting"
        forgetting = _joined(beside) if (beside / "results.json").is_file() else None
        found.append(Proof(suite, int(tasks), _joined(path.parent), forgetting))
    return sorted(found, key=lambda proof: (SUITES.index(proof.suite), proof.tasks))


def forgetting(proofs: Sequence[Proof]) -> list[Proof]:
    """Load the results of streams in which every step was scored."""
    return [replace(proof, results=proof.forgetting) for proof in proofs if proof.forgetting]


def _joined(directory: Path) -> Results:
    results = Results.load(directory)
    beside = [Results.load(path.parent) for path in sorted(directory.glob("orders-*/results.json"))]
    runs = {(run.method, run.seed): run for each in (*beside, results) for run in each.runs}
    return replace(results, runs=list(runs.values()))


def percent(spread: Spread | None) -> str:
    """Format in percent; a mean over orders has its standard deviation and their number."""
    if spread is None:
        return "–"
    return f"{100 * spread.mean:.1f}" + (f"±{100 * spread.std:.1f} ({spread.count})" if spread.std is not None else "")


def over_suites(
    proofs: Sequence[Proof],
    measure: str,
    first: Sequence[Line] = (),
    shown: Callable[[Spread | None], str] = percent,
) -> Iterator[str]:
    """Make a table with one column per suite; ``first`` are the lines above those of the methods."""
    lines = [(name, *(cell(proof) for proof in proofs)) for name, cell in first]
    for row, name in NAMES.items():
        cells = [shown(proof.results.spread(row, measure)) for proof in proofs]
        if any(cell != "–" for cell in cells):
            lines.append((name, *cells))
    yield from table(("", *(proof.title for proof in proofs)), lines)


def read_back(proofs: Sequence[Proof]) -> Iterator[str]:
    """Compare every expert on its own task with the one that the ledger returns."""
    lines = []
    for proof in proofs:
        if READ_BACK in proof.results.methods:
            (run,) = proof.results.methods[READ_BACK]
            lost = {task: run.final[task] - proof.results.fine_tuned[task] for task in proof.results.tasks}
            task = min(lost, key=lambda task: lost[task])
            whole, back = proof.mean(proof.results.fine_tuned), proof.mean(run.final)
            cells = (
                f"{100 * whole:.1f}",
                f"{100 * back:.1f}",
                f"{100 * (back - whole):+.1f}",
                f"{100 * lost[task]:+.1f} ({task})",
            )
            lines.append((proof.title, *cells))
    yield from table(("", "experts", "read back", "difference", "the worst one"), lines)


def costs(proofs: Sequence[Proof]) -> Iterator[str]:
    """Tabulate bytes of the last state, and seconds of the last add and of an export."""
    lines = []
    for proof in proofs:
        for row in ("average", "opcm", "ledger"):
            if row in proof.results.methods:
                last = proof.results.methods[row][0].steps[-1]
                exporting = last.get("export_seconds")
                lines.append(
                    (
                        proof.title,
                        NAMES[row],
                        f"{last['state_bytes'] / proof.results.model_bytes:.2f}",
                        f"{last['absorb_seconds']:.1f}",
                        "–" if exporting is None else f"{exporting:.1f}",
                    )
                )
    yield from table(("", "method", "state / base, bytes", "add, s", "export, s"), lines)


def picture(proofs: Sequence[Proof], path: Path) -> None:
    """Plot ACC on the vision suite against the number of merged experts."""
    from matplotlib.figure import Figure

    from benchmarks.figures import CURVES as COLOURS
    from benchmarks.figures import GREY

    chosen = [proof for proof in proofs if proof.suite == "vision"]
    counts = [proof.tasks for proof in chosen]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for values, name in (("fine_tuned", "each expert alone"), ("pretrained", "the base")):
        heights = [100 * proof.mean(getattr(proof.results, values)) for proof in chosen]
        axes.plot(counts, heights, "--", color=GREY)
        axes.annotate(name, (counts[-1], heights[-1]), (4, 0), textcoords="offset points", color=GREY, va="center")
    for colour, (row, name) in zip(COLOURS, CURVES.items(), strict=False):
        points = [(proof.tasks, found) for proof in chosen if (found := proof.results.spread(row, "acc"))]
        heights = [100 * found.mean for _, found in points]
        bands = [100 * (found.std or 0) for _, found in points]
        places = [count for count, _ in points]
        axes.errorbar(places, heights, bands, fmt="o-", color=colour, capsize=2, markersize=5)
        if points:
            end = (places[-1], heights[-1])
            axes.annotate(name, end, (4, 0), textcoords="offset points", color=colour, va="center")
    axes.set(
        xlabel="experts merged",
        ylabel="accuracy on all their tasks (%)",
        xticks=counts,
        xlim=(counts[0] - 1, counts[-1] + 5),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger_results", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    directory: Path = parser.parse_args(arguments).directory
    proofs = find(directory)
    if not proofs:
        parser.error(f"{directory} has no SUITE-TASKS/results.json; protocol.md has the commands that make them")
    for row in (*NAMES, READ_BACK):
        Row.parse(row)  # a name of the protocol that bench would not know
    known: list[Line] = [
        ("base", lambda proof: f"{100 * proof.mean(proof.results.pretrained):.1f}"),
        ("experts", lambda proof: f"{100 * proof.mean(proof.results.fine_tuned):.1f}"),
    ]
    sections = {
        "ACC (%): the mean over all tasks after the last expert": over_suites(proofs, "acc", known),
        "The worst task (%)": over_suites(proofs, "worst"),
        "Experts read back from the ledger (%), each on its own task": read_back(proofs),
        "What it takes": costs(proofs),
    }
    if chosen := [proof for proof in proofs if proof.with_choices]:
        choices = [proof.narrowed(proof.with_choices) for proof in chosen]
        others = [proof.narrowed([t for t in proof.results.tasks if t not in proof.with_choices]) for proof in chosen]
        sections["ACC of the tasks with choices (%)"] = over_suites(choices, "acc", known)
        sections["ACC of the tasks that are written out (%)"] = over_suites(others, "acc", known)
    read = [proof for proof in proofs if PERPLEXITY in proof.results.beside]
    if read:
        base: Line = ("base", lambda proof: f"{proof.results.beside[PERPLEXITY]:.2f}")
        sections["Perplexity on neutral text"] = over_suites(read, PERPLEXITY, [base], plain)
    looked_back = forgetting(proofs)
    for title, measure in {"BWT (points)": "bwt", "Retention (points)": "retention"}.items():
        if measured := [proof for proof in looked_back if any(proof.results.spread(row, measure) for row in NAMES)]:
            sections[title] = over_suites(measured, measure)
    text = "\n".join(line for title, lines in sections.items() for line in (f"## {title}", "", *lines, ""))
    write_text(directory / "tables.md", text)
    if any(proof.suite == "vision" for proof in proofs):
        picture(proofs, directory / "accuracy-over-models.png")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
