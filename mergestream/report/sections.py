"""The sections of a report: one list, which templates render as a page and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mergestream.merging.interference import Interference, largest_other
from mergestream.methods.scale import displayed_scale
from mergestream.report.diagnostics import HIGH_DAMAGE
from mergestream.report.scores import describe_evaluation
from mergestream.report.tables import (
    Cell,
    Table,
    format_number,
    number_cell,
    shaded_table,
    short_name,
    short_names,
)
from mergestream.sizes import counted

if TYPE_CHECKING:
    from mergestream.report.facts import Facts
    from mergestream.report.scores import Scores
    from mergestream.store import Expert

MAX_EXPERTS = 24
"""Experts in a table with a column for each: the last ones"""
_LAST = slice(-MAX_EXPERTS, None)


@dataclass(frozen=True)
class Section:
    """A heading with sentences, a table and a caption, each of them optional."""

    key: str
    title: str
    caption: str = ""
    sentences: Sequence[str] = ()
    table: Table | None = None


def make_sections(facts: Facts) -> list[Section]:
    """All sections that a store has data for."""
    return [section for section in _sections(facts) if section.sentences or section.table]


def _sections(facts: Facts) -> Iterator[Section]:
    scores = facts.scores
    if scores and scores.has_experts:
        yield _against_experts(scores)
    yield Section("findings", "Findings", sentences=facts.findings())
    if not facts.history:
        return
    yield _experts(facts)
    if scores:
        yield _scores(scores)
    if facts.interference:
        yield from _interference(facts, facts.interference)
    yield _shares(facts)


def _against_experts(scores: Scores) -> Section:
    tasks = sorted(scores.compared(), key=lambda task: -task.lost)
    worst = tasks[:MAX_EXPERTS]
    caption = f"The {scores.metric} of the merged model on each task, and of the task's own expert"
    caption += " and the base." if scores.base else "."
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
    history, found = facts.history, facts.interference
    columns = {
        "expert": [
            Cell(name, sort=entry.name, title=entry.source) for name, entry in zip(facts.names, history, strict=True)
        ],
        "step": [Cell(str(step), sort=step) for step in range(1, len(history) + 1)],
        "added": [Cell(entry.added[:19].replace("T", " "), sort=entry.added) for entry in history],
        "‖Δ‖": [number_cell(entry.norm, ".4g") for entry in history],
        facts.share: [Cell(f"{share:.1%}", sort=share, bar=share) for share in facts.survival.total],
    }
    if found:
        columns |= {
            "damage": [number_cell(damage) for damage in found.damage],
            "most similar": _most_similar(facts, found),
        }
    else:
        scales = [displayed_scale(facts.manifest.method, entry.scale) for entry in history]
        columns |= {
            scales[0][0]: [number_cell(scale, ".4g") for _, scale in scales],
            "‖merged − base‖": [number_cell(entry.distance, ".4g") for entry in history],
        }
    if any(entry.gates or entry.evaluation for entry in history):
        columns["gates"] = [Cell(_describe_gates(entry), sort=len(entry.gates)) for entry in history]
    caption = f"‖Δ‖ is the norm of the task vector, {facts.share} the share of ‖Δ‖² that {facts.share_of}."
    if len(history) > MAX_EXPERTS:
        caption += f" The tables below show the last {MAX_EXPERTS} of {len(history)} experts."
    table = Table(tuple(columns), list(zip(*columns.values(), strict=True)))
    return Section("experts", "Experts, in the order they were added", caption, table=table)


def _most_similar(facts: Facts, found: Interference) -> list[Cell]:
    """For each expert, the other one with the largest cosine, and the cosine."""
    largest = [largest_other(row, expert) for expert, row in enumerate(found.cosines)]
    return [
        Cell(facts.names[pair[1]], format_number(pair[0]), sort=pair[0]) if pair else Cell("–", sort="")
        for pair in largest
    ]


def _describe_gates(entry: Expert) -> str:
    found = [f"{gate['gate']} ({format_number(gate['value'])})" for gate in entry.gates]
    found += [f"score {describe_evaluation(entry.evaluation)}"] if entry.evaluation else []
    return ", ".join(found) or "–"


def _scores(scores: Scores) -> Section:
    steps = list(enumerate(scores.matrix, 1))[_LAST]
    rows: dict[str, Sequence[float | None]] = {f"after step {step}": row[_LAST] for step, row in steps}
    if scores.base:
        rows = {"base": scores.base[_LAST], **rows}
    caption = f"The {scores.metric} of the merged model on each task."
    if scores.acc is not None:
        caption += f" ACC {scores.acc:.3f} is the mean after the last step."
    if scores.bwt is not None:
        meaning = "below 0: earlier tasks were forgotten" if scores.bwt < 0 else "not below 0: nothing was forgotten"
        change = format_number(scores.bwt, "+.3f")
        caption += f" BWT {change} is the mean change since a task's expert was added ({meaning})."
    if len(scores.tasks) > MAX_EXPERTS:
        caption += f" This shows the last {len(steps)} steps and {MAX_EXPERTS} tasks."
    values = [value for row in rows.values() for value in row if value is not None]
    table = shaded_table(
        "", short_names(scores.tasks[_LAST]), rows, least=min(values, default=0.0), most=max(values, default=0.0)
    )
    return Section("scores", f"Scores ({scores.metric})", caption, table=table)


def _by_layer(
    facts: Facts,
    layers: Sequence[str],
    totals: Sequence[float | None],
    values: Sequence[Sequence[float | None]],
    form: str,
) -> Table:
    """Layer × expert, the totals of all layers first; ``values`` are expert × layer."""
    by_layer = zip(layers, zip(*values[_LAST], strict=True), strict=True)
    return shaded_table("layer", facts.names[_LAST], {"all layers": totals[_LAST], **dict(by_layer)}, form)


def _shares(facts: Facts) -> Section:
    """How much of each expert an accumulator took in, or a ledger holds."""
    layers = facts.survival.by_layer()
    caption = f"The share of each task vector's squared norm that {facts.share_of}."
    if facts.interference:
        room = counted(facts.manifest.sharing, "expert")
        caption += f" The ledger's budget is laid out for {room}; with more, it holds less of each."
    table = _by_layer(facts, layers.parts, facts.survival.total, layers.kept, ".1%")
    return Section("shares", f"Share {facts.share}, by layer", caption, table=table)


def _interference(facts: Facts, found: Interference) -> Iterator[Section]:
    """How the experts of a ledger affect each other."""
    if len(facts.history) > 1:
        names = facts.names[_LAST]
        caption = (
            "Cosines of the task vectors, as far as the ledger holds them: 1 is the same direction, 0 is unrelated; "
            "below 0, experts work against each other."
        )
        rows = dict(zip(names, (row[_LAST] for row in found.cosines[_LAST]), strict=True))
        yield Section("similarity", "Similarity of the experts", caption, table=shaded_table("cosine", names, rows))
    if found.layers:
        caption = (
            "How far the merged model is from each expert on that expert's own inputs: 0 is no difference, 1 is as far "
            f"as the base. Above {HIGH_DAMAGE} the model serves an expert badly."
        )
        table = _by_layer(facts, found.layers, found.damage, found.layer_damage, ".3f")
        yield Section("damage", "Predicted damage, by layer", caption, table=table)
