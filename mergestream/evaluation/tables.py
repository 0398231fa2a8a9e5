"""Tables in the paper's layout: Table 1 (ACC and BWT), and the accuracy of the last model by task."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mergestream.display import markdown_table
from mergestream.escaping import MAX_SENTENCE, markdown_text, one_line
from mergestream.evaluation.results import Results
from mergestream.evaluation.suites import loading
from mergestream.files import write_text
from mergestream.report.metrics import Spread, mean

PRETRAINED, FINE_TUNED = "Pre-Trained", "Fine-Tuned"


@dataclass(frozen=True)
class Table:
    """Groups of rows of text; LaTeX and Markdown show the best cells in bold."""

    caption: str
    header: tuple[str, ...]
    groups: tuple[tuple[tuple[str, ...], ...], ...]
    best: frozenset[tuple[int, int, int]] = frozenset()  # group, row, column

    def markdown(self) -> str:
        """Format as Markdown."""
        rows = [row for group in self._emphasised("**{}**", markdown_text) for row in group]
        header = [markdown_text(cell) for cell in self.header]
        return "\n".join([markdown_text(self.caption, MAX_SENTENCE), "", *markdown_table(header, rows), ""])

    def latex(self) -> str:
        """Format as LaTeX."""
        lines = [r"\begin{table}[t]", r"  \centering", f"  \\caption{{{_escape(self.caption)}}}"]
        lines += [f"  \\begin{{tabular}}{{ll{'c' * (len(self.header) - 2)}}}", r"    \toprule"]
        lines.append(_latex_row(map(_escape, self.header)))
        for group in self._emphasised(r"\textbf{{{}}}", _escape):
            lines += [r"    \midrule", *map(_latex_row, group)]
        return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""])

    def _emphasised(self, form: str, escape: Callable[[str], str]) -> list[list[list[str]]]:
        """Return the escaped groups, with ``form`` applied to the best cells."""
        return [
            [
                [(form if (g, r, c) in self.best else "{}").format(escape(cell)) for c, cell in enumerate(row)]
                for r, row in enumerate(group)
            ]
            for g, group in enumerate(self.groups)
        ]

    def csv(self) -> str:
        """Format as CSV."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows(row for group in self.groups for row in group)
        return stream.getvalue()

    def write(self, directory: Path, name: str) -> None:
        """Write ``name.md``, ``name.tex`` and ``name.csv``."""
        directory.mkdir(parents=True, exist_ok=True)
        for suffix, text in (("md", self.markdown()), ("tex", self.latex()), ("csv", self.csv())):
            write_text(directory / f"{name}.{suffix}", text)


def _latex_row(cells: Iterable[str]) -> str:
    return "    " + " & ".join(cells) + r" \\"


_LATEX: dict[str, str | int | None] = {
    **{mark: f"\\{mark}" for mark in "%_&#${}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"±": r"$\pm$", "↑": r"$\uparrow$", "λ": r"$\lambda$", "α": r"$\alpha$", "β": r"$\beta$"},
}


def _escape(text: str) -> str:
    return one_line(text, MAX_SENTENCE).translate(str.maketrans(_LATEX))


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


@cache
def paper_results() -> dict[str, Any]:
    """Read the paper's printed numbers (``table1``, ``single_model``, …); empty outside a checkout."""
    path = loading.find_in_checkout("paper_results.json")
    loaded: dict[str, Any] = json.loads(path.read_text("utf-8")) if path else {}
    return loaded


def table1_value(metric: str, method: str, arch: str, tasks: int) -> tuple[float, float | None] | None:
    """Return the paper's mean and standard deviation in percent, e.g. of ``("acc", "OPCM", "ViT-B/32", 8)``."""
    for entry in paper_results().get("table1", ()):
        if (entry["metric"], entry["method"], entry["arch"], entry["tasks"]) == (metric, method, arch, tasks):
            return entry["mean"], entry["std"]
    return None


def table1(results: Results) -> Table:
    """Make the paper's Table 1: single models, then ACC, then BWT, with mean±std over the orders.

    For the paper's own suite, another column has its printed numbers.
    """
    column = f"{results.model}, {len(results.tasks)} tasks"
    has_paper = table1_value("acc", PRETRAINED, results.model, len(results.tasks)) is not None
    header = ("", "Method", column, *(("paper (not ours)",) if has_paper else ()))

    def row(metric: str, shown: str, label: str, cell: str) -> tuple[str, ...]:
        if not has_paper:
            return shown, label, cell
        value = table1_value(metric, label, results.model, len(results.tasks))
        if value is None:
            return shown, label, cell, "–"
        return shown, label, cell, f"{value[0]:.1f}" + (f"±{value[1]:.1f}" if value[1] is not None else "")

    single = [
        row("acc", "", label, percent(Spread.of([mean(list(accuracies.values()))])))
        for label, accuracies in ((PRETRAINED, results.pretrained), (FINE_TUNED, results.fine_tuned))
    ]
    groups, best = [tuple(single)], set()
    summary = results.summary()
    for metric, shown in (("acc", "ACC↑"), ("bwt", "BWT↑"), ("worst", "worst↑"), ("retention", "retention↑")):
        known = {method: values[metric] for method, values in summary.items() if values[metric]}
        if not known:
            continue
        rows = [row(metric, shown, results.label(method), percent(Spread(**value))) for method, value in known.items()]
        best.add((len(groups), _argmax([value["mean"] for value in known.values()]), 2))
        groups.append(tuple(rows))
    for name, of_base in results.beside.items():
        known = {method: values[name] for method, values in summary.items() if values[name]}
        measured = [(PRETRAINED, plain(Spread.of([of_base])))]
        measured += [(results.label(method), plain(Spread(**value))) for method, value in known.items()]
        groups.append(tuple(row(name, name, *each) for each in measured))
    orders = results.settings.get("orders", "?")
    caption = (
        f"Continual merging of {len(results.tasks)} experts of {results.model} (suite {results.suite}), mean±std over "
        f"{orders} orders of arrival, in percent. ACC: mean over all tasks after the last expert; BWT: change since a "
        "task's own expert was added; worst: the worst task; retention: tasks not merged yet, against the base. "
        "Numbers without ± were measured in one order."
    )
    return Table(caption, header, tuple(groups), frozenset(best))


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda index: values[index])


def per_task_table(results: Results) -> Table:
    """Make the paper's per-task table: the last model's accuracy on each task, mean over the orders."""
    rows: list[tuple[str, list[float]]] = []
    for method, runs in results.methods.items():
        means = [Spread.of([run.final.get(task) for run in runs]) for task in results.tasks]
        rows.append((results.label(method), [spread.mean if spread else float("nan") for spread in means]))
    single = [
        (PRETRAINED, [results.pretrained[task] for task in results.tasks]),
        (FINE_TUNED, [results.fine_tuned[task] for task in results.tasks]),
    ]

    def cells(label: str, values: list[float]) -> tuple[str, ...]:
        return label, *(f"{100 * value:.1f}" for value in values), f"{100 * sum(values) / len(values):.1f}"

    best = {(1, _argmax([values[column] for _, values in rows]), column + 1) for column in range(len(results.tasks))}
    best.add((1, _argmax([sum(values) for _, values in rows]), len(results.tasks) + 1))
    caption = (
        f"Accuracy (percent) on each task after the last model, {results.model}, suite {results.suite}, "
        "mean over the orders of arrival."
    )
    groups = (tuple(cells(*row) for row in single), tuple(cells(*row) for row in rows))
    return Table(caption, ("Model", *results.tasks, "mean"), groups, frozenset(best))
