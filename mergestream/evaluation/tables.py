"""Tables in the paper's layout: Table 1 (ACC and BWT), and the last model by task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mergestream.escaping import MAX_SENTENCE, markdown_table, markdown_text
from mergestream.evaluation.results import Results, Spread
from mergestream.files import write_text
from mergestream.report.scores import mean

PRETRAINED, FINE_TUNED = "Pre-Trained", "Fine-Tuned"


@dataclass(frozen=True)
class Table:
    """Rows of text; Markdown shows the best cells in bold."""

    caption: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    best: set[tuple[int, int]] = field(default_factory=set)
    """Row and column"""

    def markdown(self) -> str:
        rows = [
            [f"**{markdown_text(cell)}**" if (r, c) in self.best else markdown_text(cell) for c, cell in enumerate(row)]
            for r, row in enumerate(self.rows)
        ]
        header = [markdown_text(cell) for cell in self.header]
        return "\n".join([markdown_text(self.caption, MAX_SENTENCE), "", *markdown_table(header, rows), ""])

    def write(self, directory: Path, name: str) -> str:
        """Write ``name.md``; returns the name of the file."""
        write_text(directory / f"{name}.md", self.markdown())
        return f"{name}.md"


def write_tables(results: Results, directory: Path) -> list[str]:
    """Write all tables; returns the names of the files."""
    return [table1(results).write(directory, "table1"), per_task_table(results).write(directory, "per-task")]


def percent(spread: Spread | None) -> str:
    """Format mean±std in percent."""
    return _format_spread(spread, 100, ".1f")


def plain(spread: Spread | None) -> str:
    """Format mean±std of a measure of any size, such as a perplexity."""
    return _format_spread(spread, 1, ".2f" if spread is None or spread.mean < 1e5 else ".1e")


def _format_spread(spread: Spread | None, factor: float, form: str) -> str:
    if spread is None:
        return "–"
    deviation = "" if spread.std is None else f"±{factor * spread.std:{form}}"
    return f"{factor * spread.mean:{form}}{deviation}"


def table1(results: Results) -> Table:
    """Make the paper's Table 1: single models, then ACC, BWT and other measures, with mean±std over the orders."""
    rows = [
        ("", label, percent(Spread.of([mean(list(accuracies.values()))])))
        for label, accuracies in ((PRETRAINED, results.pretrained), (FINE_TUNED, results.fine_tuned))
    ]
    best = set()
    for measure, shown in (("acc", "ACC↑"), ("bwt", "BWT↑"), ("worst", "worst↑"), ("retention", "retention↑")):
        known = {method: spread for method in results.methods if (spread := results.spread(method, measure))}
        if known:
            best.add((len(rows) + _argmax([spread.mean for spread in known.values()]), 2))
            rows += [(shown, results.label(method), percent(spread)) for method, spread in known.items()]
    for name, of_base in results.beside.items():
        rows.append((name, PRETRAINED, plain(Spread.of([of_base]))))
        spreads = {method: results.spread(method, name) for method in results.methods}
        rows += [(name, results.label(method), plain(spread)) for method, spread in spreads.items() if spread]
    orders = max(map(len, results.methods.values()), default=0)
    caption = (
        f"Continual merging of {len(results.tasks)} experts of {results.model} (suite {results.suite}), mean±std over "
        f"{orders} orders of arrival, in percent. ACC: mean over all tasks after the last expert; BWT: change since a "
        "task's own expert was added; worst: the worst task; retention: tasks not merged yet, against the base. "
        "Numbers without ± were measured in one order. Names are those of the paper (C.: continual)."
    )
    return Table(caption, ("", "Method", f"{results.model}, {len(results.tasks)} tasks"), rows, best)


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda index: values[index])


def per_task_table(results: Results) -> Table:
    """Make the paper's per-task table: the last model's accuracy on each task, mean over the orders."""
    known = {PRETRAINED: results.pretrained, FINE_TUNED: results.fine_tuned}
    lines = [(label, [accuracies[task] for task in results.tasks]) for label, accuracies in known.items()]
    for method, runs in results.methods.items():
        spreads = [Spread.of([run.final.get(task) for run in runs]) for task in results.tasks]
        lines.append((results.label(method), [spread.mean if spread else float("nan") for spread in spreads]))
    lines = [(label, [*values, sum(values) / len(values)]) for label, values in lines]
    rows = [(label, *(f"{100 * value:.1f}" for value in values)) for label, values in lines]
    columns = zip(*(values for _, values in lines[len(known) :]), strict=True)
    best = {(len(known) + _argmax(column), place) for place, column in enumerate(columns, 1)}
    caption = (
        f"Accuracy (percent) on each task after the last model, {results.model}, suite {results.suite}, "
        "mean over the orders of arrival."
    )
    return Table(caption, ("Model", *results.tasks, "mean"), rows, best)
