"""The report as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mergestream.escaping import MAX_SENTENCE, code, markdown_text
from mergestream.methods.scale import displayed_scale
from mergestream.report.diagnostics import MOST_SHOWN, few
from mergestream.report.facts import Facts, shown
from mergestream.report.harness import told
from mergestream.report.ledger import LedgerFacts
from mergestream.report.verdict import bwt_in_words, signed, verdict

if TYPE_CHECKING:
    from mergestream.store import Expert

FEWEST = 20
"""Layers that are listed, those of which the least survived."""


def markdown(facts: Facts) -> str:
    base = facts.manifest.base
    lines = [
        f"# {markdown_text(facts.store)}",
        "",
        markdown_text(verdict(facts), MAX_SENTENCE),
        "",
        f"* Method: {markdown_text(facts.manifest.method)}; parameters: {markdown_text(facts.parameters) or 'none'}",
        f"* Base: {code(base.source)} (digest {code(base.digest)})",
        f"* Experts: {len(facts.history)}",
        "",
    ]
    if findings := facts.findings():
        lines += ["## Worth a look", "", *(f"* {markdown_text(sentence, MAX_SENTENCE)}" for sentence in findings), ""]
    if facts.conflicts:
        told = few(map(str, facts.conflicts))
        lines += ["## Conflicts", "", *(f"* {markdown_text(sentence, MAX_SENTENCE)}" for sentence in told), ""]
    if facts.scores:
        lines += _scores(facts)
    if facts.history:
        some = facts.shown
        lines += [*_experts(facts), *([facts.selection, ""] if facts.selection else []), *_similarity(some)]
        lines += _ledger(some.ledger) if some.ledger else _survival(some)
    lines += ["## Commands", "", "```sh", *facts.commands, "```", ""]
    return "\n".join(lines)


def _experts(facts: Facts) -> Iterable[str]:
    outcome = ("held", "predicted damage") if facts.ledger else ("‖merged − base‖", *_scale_headings(facts), "kept")
    headings = ("step", "expert", "added", "‖Δ‖", "n", *outcome, "digest")
    rows = (
        (
            *(
                number,
                markdown_text(entry.name),
                markdown_text(entry.added),
                f"{entry.norm:.4g}",
                f"{entry.mean_norm:.4g}",
            ),
            *(_of_ledger(facts.ledger, number) if facts.ledger else _of_state(facts, number, entry)),
            code(entry.digest),
        )
        for number, entry in enumerate(facts.history, 1)
    )
    yield from ("## Experts", "", *table(headings, rows), "")
    gated = [entry for entry in facts.history if entry.gates or entry.evaluation]
    for entry in gated:
        passed = [f"{markdown_text(gate['gate'])} ({shown(gate['value'])})" for gate in entry.gates]
        scored = (
            [f"score {markdown_text(told(entry.evaluation))} by {code(entry.evaluation['command'])}"]
            if entry.evaluation
            else []
        )
        yield f"* {markdown_text(entry.name)} passed: {', '.join([*passed, *scored])}"
    if gated:
        yield ""


def _scale_headings(facts: Facts) -> tuple[str, ...]:
    """λ of OPCM is to be seen against √t."""
    return ("λ", "√t") if facts.manifest.is_opcm else ("scale",)


def _of_state(facts: Facts, number: int, entry: Expert) -> tuple[str, ...]:
    scale = f"{displayed_scale(facts.manifest.method, entry.scale)[1]:.4g}"
    scales = (scale, f"{math.sqrt(number):.4g}") if facts.manifest.is_opcm else (scale,)
    return (shown(entry.distance, ".4g"), *scales, f"{entry.kept:.1%}")


def _of_ledger(ledger: LedgerFacts, number: int) -> tuple[str, ...]:
    return f"{ledger.held[number - 1]:.1%}", shown(ledger.damage[number - 1])


def _similarity(facts: Facts) -> Iterable[str]:
    names = facts.similarity.experts
    rows = ((markdown_text(name), *map(shown, row)) for name, row in zip(names, facts.similarity.cosines, strict=True))
    yield from ("## Cosine similarity of the task vectors", "", *table(("", *map(markdown_text, names)), rows), "")
    yield from (f"Estimated from sketches; standard error {facts.similarity.standard_error:.4f}.", "")


def _survival(facts: Facts) -> Iterable[str]:
    layers = facts.survival.by_layer()
    order = sorted(range(len(layers.parts)), key=lambda i: min(row[i] for row in layers.kept))
    rows = (
        (
            markdown_text(layers.parts[i]),
            *(f"{row[i]:.1%}" for row in layers.kept),
            *(shown(row[i], ".0f") for row in layers.protected[-1:]),
        )
        for i in order[:FEWEST]
    )
    yield from ("## What survived, by layer (least first)", "")
    yield from (*table(("layer", *map(markdown_text, layers.experts), "protected rank q"), rows), "")
    if len(order) > FEWEST:
        yield from (f"… and {len(order) - FEWEST} more layers, of which more survived (`--format json` has all).", "")


def _ledger(ledger: LedgerFacts) -> Iterable[str]:
    names, found = [markdown_text(name) for name in ledger.experts], ledger.interference
    layers = ledger.holding.by_layer()
    yield from ("## What the entries hold, by layer (least first)", "")
    yield from _worst(layers.parts, layers.kept, names, ".1%", least=True)
    yield from ("## Predicted damage, by layer (largest first)", "")
    yield from _worst(found.layers, found.layer_damage, names, ".3f")
    yield from ("## Colliding inputs", "")
    yield from table(("", *names), ((name, *map(shown, row)) for name, row in zip(names, ledger.overlap, strict=True)))
    yield from ("", "The overlap of the inputs that experts answer to, in the mean over the linear weights.", "")
    yield from ("## Colliding inputs, by layer (largest first)", "")
    yield from _worst(found.layers, ledger.layer_overlap, names, ".3f")
    yield from ("The largest overlap of each expert with another one.", "")


def _worst(
    parts: Sequence[str],
    rows: Sequence[Sequence[float | None]],
    names: Sequence[str],
    form: str,
    *,
    least: bool = False,
) -> Iterable[str]:
    """The parts in which experts fare worst, as a table with a column for each of the experts' names, as they are."""

    def worst(part: int) -> float:
        known = [-value if least else value for row in rows if (value := row[part]) is not None]
        return max(known, default=-math.inf)

    order = sorted(range(len(parts)), key=lambda part: -worst(part))
    shares = ((markdown_text(parts[part]), *(shown(row[part], form) for row in rows)) for part in order[:FEWEST])
    yield from (*table(("layer", *names), shares), "")
    if len(order) > FEWEST:
        yield from (f"… and {len(order) - FEWEST} more layers (`--format json` has all).", "")


def _scores(facts: Facts) -> Iterable[str]:
    scores, last = facts.scores, facts.shown.scores
    assert scores is not None and last is not None
    first = len(scores.matrix) - len(last.matrix) + 1
    found = scores.compared()
    if any(task.expert is not None for task in found):
        worst = sorted(found, key=lambda task: -task.lost)[:MOST_SHOWN]
        against = (
            (markdown_text(task.task), *map(shown, (task.merged, task.expert, task.base)), f"{task.lost:.1%}")
            for task in worst
        )
        yield from ("## Scores against the experts (the most lost first)", "")
        yield from (*table(("task", "merged", "expert", "base", "lost"), against), "")
    rows = ((number, *map(shown, row)) for number, row in enumerate(last.matrix, first))
    yield from (
        f"## Scores ({markdown_text(scores.metric)})",
        "",
        *table(("after step", *map(markdown_text, last.tasks)), rows),
        "",
    )
    bwt = "–" if scores.bwt is None else f"{signed(scores.bwt)} ({bwt_in_words(scores.bwt)})"
    yield from (f"ACC {shown(scores.acc)}, BWT {bwt}", "")


def table(headings: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Iterable[str]:
    yield from (_row(headings), "|" + "---|" * len(headings), *map(_row, rows))


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
