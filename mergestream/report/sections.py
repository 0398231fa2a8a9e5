"""The sections of a report: one list, which templates render as a page and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mergestream.methods.scale import displayed_scale
from mergestream.report.diagnostics import MAX_EXPERTS, Survival
from mergestream.report.harness import describe_evaluation
from mergestream.report.ledger import HIGH_DAMAGE, LedgerFacts
from mergestream.report.tables import (
    Cell,
    Table,
    companion_cell,
    layer_table,
    name_cell,
    number_cell,
    pair_table,
    share_of,
    step_table,
)
from mergestream.report.wording import (
    explain_bwt,
    format_change,
    format_number,
    short_name,
    short_names,
    shorten_findings,
)
from mergestream.sizes import counted

if TYPE_CHECKING:
    from mergestream.report.facts import Facts
    from mergestream.report.scores import Scores
    from mergestream.store import Expert


@dataclass(frozen=True)
class Section:
    """A heading with sentences, a table, a figure and a caption, each of them optional."""

    key: str
    title: str
    caption: str = ""
    sentences: Sequence[str] = ()
    table: Table | None = None
    figure: tuple[str, Any] | None = None
    """The function in ``figures`` that draws it, and what; Markdown has no figures"""


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page."""

    label: str
    value: str
    hint: str
    tone: str = ""


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
    found.append(_norms(facts))
    if len(facts.history) > 1:
        found.append(_similarity(facts))
    if facts.scores:
        found.append(_scores(facts.scores))
    matrices = _ledger_sections(facts, facts.ledger) if facts.ledger else _state_sections(facts)
    for section in matrices:
        found.append(replace(section, caption=f"{section.caption} {facts.selection}".strip()))
    return found


def make_tiles(facts: Facts) -> Iterator[Tile]:
    """The numbers at the top of the page."""
    if not facts.history:
        yield Tile("experts", "0", "add one: mergestream add")
        return
    last, count = facts.history[-1], len(facts.history)
    yield Tile("experts", str(count), f"the last: {short_name(last.name)}")
    if facts.ledger:
        share, name = min(zip(facts.ledger.held, facts.ledger.experts, strict=True))
        yield Tile("least held", f"{share:.0%}", short_name(name))
        if largest := facts.ledger.interference.largest_damage:
            yield Tile("largest damage", f"{largest[0]:.2f}", short_name(largest[1]))
    else:
        label, scale = displayed_scale(facts.manifest.method, last.scale)
        hint = f"√{count} = {count**0.5:.3g}" if facts.manifest.is_opcm else "of the merged task vector"
        yield Tile(label, f"{scale:.3g}", hint)
        yield Tile("‖merged − base‖", format_number(last.distance, ".3g"), f"mean of the experts: {last.mean_norm:.3g}")
        least = min(facts.history, key=lambda entry: entry.kept)
        yield Tile("least kept", f"{least.kept:.0%}", short_name(least.name))
    if pair := max(facts.similarity.pairs(), default=None):
        names = (short_name(facts.history[i].name) for i in pair[1:])
        yield Tile("largest cosine", format_number(pair[0], ".2f"), " and ".join(names))
    if facts.scores and facts.scores.acc is not None:
        yield Tile("ACC", format_number(facts.scores.acc), f"mean {facts.scores.metric} over all tasks")
    if facts.scores and (bwt := facts.scores.bwt) is not None:
        yield Tile("BWT", format_change(bwt), explain_bwt(bwt), "lost" if bwt < 0 else "won")


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
            name_cell(task.task),
            *(number_cell(value) for value in (task.merged, task.expert, task.base)),
            Cell(format_number(task.lost, ".1%"), sort=task.lost),
        ]
        for task in worst
    ]
    table = Table(("task", "merged", "expert", "base", "lost"), rows)
    return Section("against", "Scores against the experts", caption, table=table, figure=("against_experts", scores))


def _experts(facts: Facts) -> Section:
    ledger, method = facts.ledger, facts.manifest.method
    outcome = ("held", "damage", "overlaps most with") if ledger else ("kept", displayed_scale(method, 1)[0])
    rows = []
    for i, entry in enumerate(facts.history):
        share = ledger.held[i] if ledger else entry.kept
        if ledger:
            cells = [number_cell(ledger.damage[i]), companion_cell(ledger.interference.closest(i))]
        else:
            cells = [number_cell(displayed_scale(method, entry.scale)[1], ".4g")]
        rows.append(
            [
                replace(name_cell(entry.name), title=entry.source),
                Cell(str(i + 1), sort=i + 1),
                Cell(entry.added.replace("T", " ").replace("+00:00", ""), sort=entry.added),
                number_cell(entry.norm, ".4g"),
                Cell(f"{share:.1%}", sort=share, bar=share),
                *cells,
                companion_cell(facts.nearest(i)),
                Cell(_describe_gates(entry), sort=len(entry.gates)),
            ]
        )
    headings = ("expert", "step", "added", "‖Δ‖", *outcome, "most similar", "gates")
    return Section("experts", "Experts, in the order they were added", table=Table(headings, rows))


def _describe_gates(entry: Expert) -> str:
    found = [f"{gate['gate']} ({format_number(gate['value'])})" for gate in entry.gates]
    found += [f"score {describe_evaluation(entry.evaluation)}"] if entry.evaluation else []
    return ", ".join(found) or "–"


def _scaling(history: Sequence[Expert]) -> Section:
    factors = [entry.lambda_ for entry in history]
    caption = (
        f"λ is {factors[-1]:.4g} after {counted(len(history), 'expert')}; √t is {math.sqrt(len(history)):.4g}. "
        "Orthogonal task vectors of equal norm give λ = √t."
    )
    roots = [math.sqrt(step) for step in range(1, len(history) + 1)]
    table = step_table(history, {"λ": factors, "√t": roots}, ".4f")
    return Section("scaling", "Scaling factor", caption, table=table, figure=("scaling", {"λ": factors}))


def _norms(facts: Facts) -> Section:
    history, last = facts.history, facts.history[-1]
    caption = f"The experts are {last.mean_norm:.4g} away from the base on average."
    columns: dict[str, list[float | None]] = {
        "‖Δ‖": [entry.norm for entry in history],
        "mean ‖Δ‖": [entry.mean_norm for entry in history],
    }
    if last.distance is not None:
        caption += f" The merged model is {last.distance:.4g} away from it."
        columns["‖merged − base‖"] = [entry.distance for entry in history]
    table = step_table(history, columns, ".5g")
    return Section("norms", "Distance to the base", caption, table=table, figure=("norms", history))


def _similarity(facts: Facts) -> Section:
    found = facts.similarity
    pairs = list(found.pairs())
    caption = f"Cosines of the task vectors, estimated from sketches (standard error {found.standard_error:.4f})."
    if pairs:
        value, one, other = max(pairs)
        mean = math.fsum(abs(pair[0]) for pair in pairs) / len(pairs)
        names = f"{short_name(found.experts[one])} and {short_name(found.experts[other])}"
        caption += f" {names} are the most similar ({format_number(value)}); the mean magnitude is {mean:.3f}."
    table = pair_table("cosine", facts.select(found.experts), map(facts.select, facts.select(found.cosines)))
    return Section("similarity", "Similarity of the experts", f"{caption} {facts.selection}".strip(), table=table)


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
        caption += f" BWT {format_change(scores.bwt)} is the mean change since a task's expert was added"
        caption += f" ({explain_bwt(scores.bwt)})."
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
    layers, select = facts.survival.by_layer(), facts.select
    names = select(layers.experts)
    caption = f"The share of each task vector's squared norm that entered the merged state. {_describe_least(layers)}"
    table = layer_table(names, layers.parts, select(layers.kept), ".1%", totals=select(layers.total), low_is_bad=True)
    yield Section("survival", "Share kept, by layer", caption, table=table)
    if any(layers.projected):
        projected = layers.select_parts(layers.projected)
        caption = (
            "q is the number of leading directions of the merged state that a new expert may not change. "
            "For a layer it is the mean over its linear weights. The first expert meets an empty state."
        )
        table = layer_table(names, projected.parts, select(projected.protected), ".1f")
        yield Section("protected", "Protected rank", caption, table=table)


def _ledger_sections(facts: Facts, ledger: LedgerFacts) -> Iterator[Section]:
    """What only a ledger has: how much its entries hold, and how the experts interfere."""
    layers, found, select = ledger.survival.by_layer(), ledger.interference, facts.select
    names = select(ledger.experts)
    share, name = min(zip(ledger.held, ledger.experts, strict=True))
    caption = (
        "The share of each task vector's squared norm that its entry holds while "
        f"{counted(ledger.sharing, 'expert')} share the budget. The least is {share:.1%}, of {short_name(name)}."
    )
    table = layer_table(names, layers.parts, select(layers.kept), ".1%", totals=select(ledger.held), low_is_bad=True)
    yield Section("held", "Share held, by layer", caption, table=table)
    if not found.layers:
        return
    caption = (
        "How far the merged model is from each expert on that expert's own inputs: 0 is no difference, 1 is as far as "
        f"the base. Above {HIGH_DAMAGE} the model serves an expert badly."
    )
    if largest := found.largest_damage:
        caption += f" The largest is {largest[0]:.3f}, of {short_name(largest[1])}."
    table = layer_table(names, found.layers, select(found.layer_damage), ".3f", totals=select(ledger.damage))
    yield Section("damage", "Predicted damage, by layer", caption, table=table)
    if len(ledger.experts) == 1:
        return
    caption = "How much two experts respond to the same inputs, from 0 to 1, on average over the linear weights."
    for value, one, other in ledger.pairs()[:1]:
        caption += f" The largest is {value:.3f}, of {short_name(one)} and {short_name(other)}."
    table = pair_table("overlap", names, map(select, select(ledger.overlap)))
    yield Section("overlap", "Overlap of inputs", caption, table=table)
    caption = "The largest overlap of each expert with another one. On the page, the tooltip of a cell names it."
    partners = select(ledger.layer_partner)
    table = layer_table(names, found.layers, select(ledger.layer_overlap), ".3f", partners=partners)
    yield Section("layer-overlap", "Overlap of inputs, by layer", caption, table=table)


def _describe_least(layers: Survival) -> str:
    share, layer, expert = min(
        (share, layer, expert)
        for expert, row in zip(layers.experts, layers.kept, strict=True)
        for layer, share in zip(layers.parts, row, strict=True)
    )
    return "All of it did." if share > 0.9995 else f"The least is {share:.1%}, of {short_name(expert)} in {layer}."
