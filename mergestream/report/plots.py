"""The figures of a page, each with what a reader who cannot see it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergestream.report import figures
from mergestream.report.diagnostics import MOST_SHOWN, Survival
from mergestream.report.facts import Facts, shown
from mergestream.report.ledger import DAMAGED, LedgerFacts
from mergestream.report.verdict import bwt_in_words, signed
from mergestream.sizes import counted

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True)
class Plot:
    """A figure with what a reader who cannot see it needs: a summary, and the numbers as a table."""

    key: str
    title: str
    caption: str
    figures: dict[str, go.Figure]
    """By the name of the view; several where there is a choice"""
    headings: Sequence[str]
    rows: Iterable[Sequence[Any]]
    selection: str = ""
    """Which experts it shows, where they are not all"""

    @property
    def wide(self) -> bool:
        """Whether it wants a row of its own."""
        return any(len(trace.x) > figures.MOST_LABELLED for figure in self.figures.values() for trace in figure.data)


def plots(facts: Facts) -> Iterator[Plot]:
    """All but the first, which is of the scores against the experts."""
    history, few = facts.history, facts.shown
    if not history:
        return
    if facts.manifest.is_opcm:
        yield _scaling(facts)
    yield _norms(facts)
    if len(history) > 1:
        yield _similarity(facts)
    if facts.scores:
        yield _scores(facts)
    yield from _ledger(facts, facts.ledger, few.ledger) if facts.ledger and few.ledger else _survival(facts)


def _scaling(facts: Facts) -> Plot:
    history = facts.history
    return Plot(
        "scaling",
        "Scaling factor",
        f"λ is {history[-1].lambda_:.4g} after {counted(len(history), 'expert')}; √t is {len(history) ** 0.5:.4g}. "
        "Task vectors that are orthogonal and equally long give λ = √t.",
        {"": figures.scaling(history)},
        ("step", "expert", "λ", "√t"),
        [(step, e.name, f"{e.lambda_:.4f}", f"{step**0.5:.4f}") for step, e in enumerate(history, 1)],
    )


def _norms(facts: Facts) -> Plot:
    history, last = facts.history, facts.history[-1]
    distance = "" if last.distance is None else f"The merged model is {last.distance:.4g} away from the base. "
    measured = () if facts.ledger else ("‖merged − base‖",)
    return Plot(
        "norms",
        "Distance to the base",
        f"{distance}The experts are {last.mean_norm:.4g} away from {'it' if distance else 'the base'} in the mean.",
        {"": figures.norms(history)},
        ("step", "expert", "‖Δ‖", "n", *measured),
        [
            (step, e.name, f"{e.norm:.5g}", f"{e.mean_norm:.5g}", *(shown(e.distance, ".5g") for _ in measured))
            for step, e in enumerate(history, 1)
        ],
    )


def _survival(facts: Facts) -> Iterator[Plot]:
    few = facts.shown.survival
    layers, weights = few.by_layer(), few.select(few.projected)
    yield Plot(
        "survival",
        "What survived of each expert",
        _least(facts.survival.by_layer()),
        _views(figures.survival, layers, weights),
        ("layer", *layers.experts),
        [
            (layer, *(f"{row[i]:.1%}" for row in layers.kept))
            for i, layer in enumerate(figures.short_names(layers.parts))
        ],
        facts.selection,
    )
    if any(layers.projected):
        projected = layers.select(layers.projected)
        yield Plot(
            "protected",
            "Protected rank",
            "q is the number of leading directions of the merged state that a new expert may not touch. "
            "For a layer it is the mean over its linear weights; the first expert meets an empty state.",
            _views(figures.protected, projected, weights),
            ("layer", *layers.experts),
            [
                (layer, *(shown(row[i], ".1f") for row in projected.protected))
                for i, layer in enumerate(figures.short_names(projected.parts))
            ],
            facts.selection,
        )


def _ledger(facts: Facts, everyone: LedgerFacts, ledger: LedgerFacts) -> Iterator[Plot]:
    """``ledger`` has the experts that are shown."""
    layers, found = ledger.holding.by_layer(), ledger.interference
    tensors = facts.manifest.base.tensors
    weights = ledger.holding.select([tensors[name].role == "linear" for name in ledger.holding.parts])
    yield Plot(
        "held",
        "What the entries hold",
        f"The share of each task vector's squared norm that its entry holds while {counted(ledger.room_for, 'expert')} "
        f"share the room. {_least_held(everyone)}",
        _views(figures.held, layers, weights),
        ("layer", *ledger.experts),
        _rows(layers.parts, layers.kept, ".1%"),
        facts.selection,
    )
    if not found.layers:
        return
    yield Plot(
        "damage",
        "Predicted damage",
        "How far the merged model is from doing to each expert's own inputs what that expert does: 0 is exactly "
        f"that, 1 is as far as doing nothing. Above {DAMAGED} an expert is served badly. {_largest_damage(everyone)}",
        {"experts": figures.damage(ledger), "layers": figures.layer_damage(ledger)},
        ("layer", *ledger.experts),
        [("together", *map(shown, ledger.damage)), *_rows(found.layers, found.layer_damage, ".3f")],
        facts.selection,
    )
    if len(ledger.experts) == 1:
        return
    yield Plot(
        "overlap",
        "Colliding inputs",
        "How much two experts answer to the same inputs of the linear weights, from 0 to 1 and in the mean over them. "
        f"{_largest_overlap(everyone)}",
        {"": figures.overlap(ledger)},
        ("overlap", *ledger.experts),
        [(name, *map(shown, row)) for name, row in zip(ledger.experts, ledger.overlap, strict=True)],
        facts.selection,
    )
    yield Plot(
        "collisions",
        "Colliding inputs, by layer",
        "Of each expert the largest overlap with another one in every layer; hover over a cell to see with which.",
        {"": figures.layer_overlap(ledger)},
        ("layer", *ledger.experts),
        _rows(found.layers, ledger.layer_overlap, ".3f"),
        facts.selection,
    )


def _rows(parts: Sequence[str], values: Sequence[Sequence[float | None]], form: str) -> list[tuple[str, ...]]:
    """Layers as rows, experts as columns."""
    return [(part, *(shown(row[i], form) for row in values)) for i, part in enumerate(figures.short_names(parts))]


def _least_held(ledger: LedgerFacts) -> str:
    share, name = min(zip(ledger.held, ledger.experts, strict=True))
    return f"The least is {share:.1%}, of {name}."


def _largest_damage(ledger: LedgerFacts) -> str:
    found = ledger.interference.largest_damage
    return f"The largest is {found[0]:.3f}, of {found[1]}." if found else ""


def _largest_overlap(ledger: LedgerFacts) -> str:
    found = max(ledger.pairs(), default=None)
    return f"The largest is {found[0]:.3f}, of {found[1]} and {found[2]}." if found else ""


def _views(draw: Any, layers: Survival, weights: Survival) -> dict[str, go.Figure]:
    views = {"layers": draw(layers)}
    if weights.parts and weights.parts != layers.parts:
        views["linear weights"] = draw(weights)
    return views


def _similarity(facts: Facts) -> Plot:
    found, few = facts.similarity, facts.shown.similarity
    pairs = list(found.pairs())
    caption = f"Estimated from sketches, to {found.standard_error:.3f} (standard error)."
    if pairs:
        value, one, other = max(pairs)
        mean = sum(abs(pair[0]) for pair in pairs) / len(pairs)
        names = f"{found.experts[one]} and {found.experts[other]}"
        caption = f"The most similar are {names} ({value:.3f}); the mean magnitude is {mean:.3f}. {caption}"
    return Plot(
        "similarity",
        "Similarity of the experts",
        caption,
        {"": figures.similarity(few)},
        ("cosine", *few.experts),
        [(name, *map(shown, row)) for name, row in zip(few.experts, few.cosines, strict=True)],
        facts.selection,
    )


def against_experts(facts: Facts) -> Plot | None:
    """The scores of the merged model beside those of each task's expert, where these are known."""
    found = facts.scores.compared() if facts.scores else ()
    if not facts.scores or not any(task.expert is not None for task in found):
        return None
    worst = sorted(found, key=lambda task: -task.lost)[:MOST_SHOWN]
    most = worst[0]
    caption = f"The {facts.scores.metric} of the merged model on each task, and of the task's own expert"
    caption += " and the base." if facts.scores.base else "."
    if most.lost > 0:
        caption += f" Most is lost of {most.task}, {most.lost:.0%} of what its expert has."
    return Plot(
        "against",
        "Scores against the experts",
        caption,
        {"": figures.against_experts(worst, facts.scores.metric)},
        ("task", "merged", "expert", "base", "lost"),
        [
            (task.task, *map(shown, (task.merged, task.expert, task.base)), f"{task.lost:.1%}".replace("-", "−"))
            for task in worst
        ],
        "" if len(worst) == len(found) else f"Of {len(found)} tasks the {len(worst)} that lost most are shown.",
    )


def _scores(facts: Facts) -> Plot:
    scores, last = facts.scores, facts.shown.scores
    assert scores is not None and last is not None
    first = len(scores.matrix) - len(last.matrix) + 1
    caption = f"The {scores.metric} of the merged model on each task."
    if scores.acc is not None:
        caption += f" ACC, the mean after the last step, is {scores.acc:.3f}."
    if scores.bwt is not None:
        caption += f" BWT is {signed(scores.bwt)}, {bwt_in_words(scores.bwt)}."
    return Plot(
        "scores",
        "Scores after each step",
        caption,
        {"": figures.scores(last, first)},
        ("after step", *last.tasks),
        [(number, *map(shown, row)) for number, row in enumerate(last.matrix, first)],
        "" if last == scores else f"The last {len(last.matrix)} steps and {len(last.tasks)} tasks are shown.",
    )


def _least(layers: Survival) -> str:
    share, layer, expert = min(
        (share, layer, expert)
        for expert, row in zip(layers.experts, layers.kept, strict=True)
        for layer, share in zip(layers.parts, row, strict=True)
    )
    about = "The share of each task vector's squared norm that entered the merged state."
    if share > 0.9995:
        return f"{about} Everything did."
    return f"{about} The least is {share:.1%}, of {expert} in {layer}."
