"""The report as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from mergestream.report.facts import Facts, shown

FEWEST = 20
"""Layers that are listed, those of which the least survived."""


def markdown(facts: Facts) -> str:
    base = facts.manifest.base
    lines = [
        f"# {facts.store}",
        "",
        f"* Method: {facts.manifest.method}; parameters: {facts.parameters or 'none'}",
        f"* Base: {base.source} (digest `{base.digest}`)",
        f"* Experts: {len(facts.history)}",
        "",
    ]
    if findings := facts.findings():
        lines += ["## Worth a look", "", *(f"* {sentence}" for sentence in findings), ""]
    if facts.history:
        lines += [*_experts(facts), *_similarity(facts), *_survival(facts)]
    if facts.scores:
        lines += _scores(facts)
    lines += ["## Commands", "", "```sh", *facts.commands, "```", ""]
    return "\n".join(lines)


def _experts(facts: Facts) -> Iterable[str]:
    headings = ("step", "expert", "added", "‖Δ‖", "n", "‖merged − base‖", "λ", "√t", "kept", "digest")
    rows = (
        (
            *(number, entry.name, entry.added, f"{entry.norm:.4g}", f"{entry.mean_norm:.4g}"),
            *(shown(entry.distance, ".4g"), f"{entry.lambda_:.4g}", f"{math.sqrt(number):.4g}"),
            *(f"{entry.kept:.1%}", f"`{entry.digest}`"),
        )
        for number, entry in enumerate(facts.history, 1)
    )
    yield from ("## Experts", "", *table(headings, rows), "")
    gated = [entry for entry in facts.history if entry.gates or entry.evaluation]
    for entry in gated:
        passed = [f"{gate['gate']} ({shown(gate['value'])})" for gate in entry.gates]
        scored = [f"score {entry.evaluation['score']:g} by `{entry.evaluation['command']}`"] if entry.evaluation else []
        yield f"* {entry.name} passed: {', '.join([*passed, *scored])}"
    if gated:
        yield ""


def _similarity(facts: Facts) -> Iterable[str]:
    names = facts.similarity.experts
    rows = ((name, *map(shown, row)) for name, row in zip(names, facts.similarity.cosines, strict=True))
    yield from ("## Cosine similarity of the task vectors", "", *table(("", *names), rows), "")
    yield from (f"Estimated from sketches; standard error {facts.similarity.standard_error:.4f}.", "")


def _survival(facts: Facts) -> Iterable[str]:
    layers = facts.survival.by_layer()
    order = sorted(range(len(layers.parts)), key=lambda i: min(row[i] for row in layers.kept))
    rows = (
        (
            layers.parts[i],
            *(f"{row[i]:.1%}" for row in layers.kept),
            *(shown(row[i], ".0f") for row in layers.protected[-1:]),
        )
        for i in order[:FEWEST]
    )
    yield from ("## What survived, by layer (least first)", "")
    yield from (*table(("layer", *layers.experts, "protected rank q"), rows), "")
    if len(order) > FEWEST:
        yield from (f"… and {len(order) - FEWEST} more layers, of which more survived (`--format json` has all).", "")


def _scores(facts: Facts) -> Iterable[str]:
    scores = facts.scores
    assert scores is not None
    rows = ((number, *map(shown, row)) for number, row in enumerate(scores.matrix, 1))
    yield from (f"## Scores ({scores.metric})", "", *table(("after step", *scores.tasks), rows), "")
    yield from (f"ACC {shown(scores.acc)}, BWT {shown(scores.bwt)}", "")


def table(headings: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Iterable[str]:
    yield from (_row(headings), "|" + "---|" * len(headings), *map(_row, rows))


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
