"""The sections of a report: one list, which templates render as a page and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mergestream.merging.interference import Interference, largest_other
from mergestream.methods.scale import displayed_scale
from mergestream.report.diagnostics import HIGH_DAMAGE, MAX_EXPERTS
from mergestream.report.harness import describe_evaluation
from mergestream.report.tables import Cell, Table, layer_table, number_cell, pair_table, share_of
from mergestream.report.wording import format_number, short_name, short_names, shorten_findings
from mergestream.sizes import counted

if TYPE_CHECKING:
    from mergestream.report.facts import Facts
    from mergestream.report.scores import Scores
    from mergestream.store import Expert


@dataclass(frozen=True)
class Section:
    """A heading with sentences, a table, a curve and a caption, each of them optional."""

    key: str
    title: str
    caption: str = ""
    sentences: Sequence[str] = ()
    table: Table | None = None
    curve: Sequence[float] = ()
    """Scaling factors, which the page draws against √t"""


def make_sections(facts: Facts) -> list[Section]:
    """All sections that a store has data for."""
    found = [
        *([_against_experts(facts.scores)] if facts.scores and facts.scores.has_experts else []),
        Section("findings", "Findings", sentences=facts.findings()),
        Section("conflicts", "Conflicts", sentences=shorten_findings(map(str, facts.conflicts))),
    ]
    found = [section for section in found if section.sentences or section.table]
    if not facts.history:
        return found
    found.append(_experts(facts))
    if facts.manifest.is_opcm:
        found.append(_scaling(facts.history))
    if facts.scores:
        found.append(_scores(facts.scores))
    found += _ledger_sections(facts, facts.interference) if facts.interference else _state_sections(facts)
    return found


def _against_experts(scores: Scores) -> Section:
    tasks = sorted(scores.compared(), key=lambda task: -task.lost)
    worst = tasks[:MAX_EXPERTS]
    caption = f"The {scores.metric} of the merged model on each task, and of the task's own expert"
    caption += " and the base." if scores.base else "."
    if worst[0].lost > 0:
        caption += f" {short_name(worst[0].task)} lost most, {worst[0].lost:.0%} of its expert's score."
    if len(worst) < len(tasks):
        caption += f" This shows the {len(worst)} of {len(tasks)} tasks that lost most."
    rows = [
        [
            Cell(short_name(task.task), sort=task.task),
            *(number_cell(value) for value in (task.merged, task.expert, task.base)),
            Cell(format_number(task.lost, ".1%"), sort=task.lost, bar=min(max(task.lost, 0.0), 1.0)),
        ]
        for task in worst
    ]
    table = Table(("task", "merged", "expert", "base", "lost"), rows)
    return Section("against", "Scores against the experts", caption, table=table)


def _experts(facts: Facts) -> Section:
    found, method = facts.interference, facts.manifest.method
    own: tuple[str, ...] = ("held", "damage", "overlaps most with", "most similar")
    if not found:
        own = ("kept", displayed_scale(method, 1)[0], "‖merged − base‖")
    rows = []
    for i, entry in enumerate(facts.history):
        if found:
            companions = [_companion(facts, matrix[i], i) for matrix in (found.overlap, found.cosines)]
            cells = [number_cell(found.damage[i]), *companions]
        else:
            cells = [number_cell(value, ".4g") for value in (displayed_scale(method, entry.scale)[1], entry.distance)]
        rows.append(
            [
                Cell(facts.names[i], sort=entry.name, title=entry.source),
                Cell(str(i + 1), sort=i + 1),
                Cell(entry.added.replace("T", " ").replace("+00:00", ""), sort=entry.added),
                number_cell(entry.norm, ".4g"),
                Cell(f"{facts.shares[i]:.1%}", sort=facts.shares[i], bar=facts.shares[i]),
                *cells,
                Cell(_describe_gates(entry), sort=len(entry.gates)),
            ]
        )
    headings = ("expert", "step", "added", "‖Δ‖", *own, "gates")
    return Section("experts", "Experts, in the order they were added", table=Table(headings, rows))


def _companion(facts: Facts, row: Sequence[float | None], own: int) -> Cell:
    """The other expert with the largest value in a row, and the value."""
    found = largest_other(row, own)
    return Cell(facts.names[found[1]], format_number(found[0]), sort=found[0]) if found else Cell("–", sort="")


def _describe_gates(entry: Expert) -> str:
    found = [f"{gate['gate']} ({format_number(gate['value'])})" for gate in entry.gates]
    found += [f"score {describe_evaluation(entry.evaluation)}"] if entry.evaluation else []
    return ", ".join(found) or "–"


def _scaling(history: Sequence[Expert]) -> Section:
    factors = [entry.lambda_ for entry in history]
    caption = (
        f"λ is {factors[-1]:.4g} after {counted(len(history), 'expert')}; √t is {math.sqrt(len(history)):.4g}. "
        "Orthogonal task vectors of equal norm give λ = √t. The table of experts has the numbers."
    )
    return Section("scaling", "Scaling factor", caption, curve=factors)


def _limit(facts: Facts) -> str:
    """Says that a table has a column for the last experts only."""
    count = len(facts.history)
    return f" This shows the last {MAX_EXPERTS} of {count} experts." if count > MAX_EXPERTS else ""


def _scores(scores: Scores) -> Section:
    last = slice(-MAX_EXPERTS, None)
    rows = {f"after step {step}": row for step, row in enumerate(scores.matrix, 1)}
    rows = dict(list(rows.items())[last])
    if scores.base:
        rows = {"base": scores.base, **rows}
    if scores.experts:
        rows["experts alone"] = scores.experts
    caption = f"The {scores.metric} of the merged model on each task."
    if scores.acc is not None:
        caption += f" ACC {scores.acc:.3f} is the mean after the last step."
    if scores.bwt is not None:
        meaning = "below 0: earlier tasks were forgotten" if scores.bwt < 0 else "not below 0: nothing was forgotten"
        change = format_number(scores.bwt, "+.3f")
        caption += f" BWT {change} is the mean change since a task's expert was added ({meaning})."
    if len(scores.tasks) > MAX_EXPERTS:
        caption += f" This shows the last {len(scores.matrix[last])} steps and {MAX_EXPERTS} tasks."
    values = [value for row in rows.values() for value in row[last] if value is not None]
    least, most = min(values, default=0.0), max(values, default=0.0)
    cells = [
        [Cell(name), *(number_cell(value, shade=share_of(value, least, most)) for value in row[last])]
        for name, row in rows.items()
    ]
    table = Table(("", *short_names(scores.tasks[last])), cells)
    return Section("scores", f"Scores ({scores.metric})", caption, table=table)


def _state_sections(facts: Facts) -> Iterator[Section]:
    """What only an accumulator has: how much entered its state, and how much of the state was protected."""
    layers = facts.survival.by_layer()
    caption = f"The share of each task vector's squared norm that entered the merged state.{_limit(facts)}"
    table = layer_table(facts.names, layers.parts, layers.kept, ".1%", layers.total, most=1.0)
    yield Section("survival", "Share kept, by layer", caption, table=table)
    if any(rank is not None for row in layers.protected for rank in row):
        caption = (
            "q is the number of leading directions of the merged state that a new expert may not change. For a layer "
            f"it is the mean over its linear weights. The first expert meets an empty state.{_limit(facts)}"
        )
        table = layer_table(facts.names, layers.parts, layers.protected, ".1f")
        yield Section("protected", "Protected rank", caption, table=table)


def _ledger_sections(facts: Facts, found: Interference) -> Iterator[Section]:
    """What only a ledger has: how much its entries hold, and how the experts interfere."""
    names, layers = facts.names, facts.survival.by_layer()
    if len(names) > 1:
        caption = f"Cosines of the task vectors, as far as the entries hold them.{_limit(facts)}"
        table = pair_table("cosine", names, found.cosines)
        yield Section("similarity", "Similarity of the experts", caption, table=table)
    caption = (
        "The share of each task vector's squared norm that its entry holds while "
        f"{counted(facts.manifest.sharing, 'expert')} share the budget.{_limit(facts)}"
    )
    table = layer_table(names, layers.parts, layers.kept, ".1%", facts.shares, most=1.0)
    yield Section("held", "Share held, by layer", caption, table=table)
    if not found.layers:
        return
    caption = (
        "How far the merged model is from each expert on that expert's own inputs: 0 is no difference, 1 is as far as "
        f"the base. Above {HIGH_DAMAGE} the model serves an expert badly.{_limit(facts)}"
    )
    table = layer_table(names, found.layers, found.layer_damage, ".3f", found.damage)
    yield Section("damage", "Predicted damage, by layer", caption, table=table)
    if len(names) > 1:
        caption = "How much two experts respond to the same inputs, from 0 to 1, on average over the linear weights."
        table = pair_table("overlap", names, found.overlap)
        yield Section("overlap", "Overlap of inputs", caption + _limit(facts), table=table)
