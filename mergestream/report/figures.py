"""The report's figures as plotly figure objects, for the page and for notebooks::

figures.similarity(store.similarity()).show()
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from mergestream.errors import MergestreamError
from mergestream.escaping import one_line
from mergestream.report.diagnostics import Similarity, Survival
from mergestream.report.facts import finite
from mergestream.report.ledger import DAMAGED, LedgerFacts
from mergestream.report.scores import Scores, TaskScore

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise MergestreamError("figures need the package plotly; pip install 'mergestream[report]'") from error

if TYPE_CHECKING:
    from mergestream.store import Expert

BLUE, ORANGE, GREY = "#2f6fde", "#d9730d", "#8a94a3"
SEQUENTIAL = ["#eef3fb", "#b9d0f5", "#7ba7ea", "#3f7ad6", "#1d4fa5", "#0c2d6b"]
DIVERGING = ["#b3470b", "#ee9a5d", "#fbe3d2", "#f4f5f7", "#d3e2fa", "#6d9deb", "#1d4fa5"]
LONGEST_NAME = 28
"""Characters of a name in a figure."""
MOST_LABELLED = 12
"""Cells carry their values up to this many in a row."""
TALLEST = 40
"""Up to this many rows a matrix grows; more share the height."""
MOST_SEPARATED = 80
"""Up to this many columns there is a gap between them."""


def scaling(history: Sequence[Expert]) -> go.Figure:
    """λ_t against √t (the paper's adaptive scaling factors)."""
    steps = list(range(1, len(history) + 1))
    figure = go.Figure()
    figure.add_scatter(
        x=steps,
        y=[math.sqrt(t) for t in steps],
        name="√t",
        mode="lines",
        line={"color": GREY, "dash": "dash", "width": 2},
        hovertemplate="√%{x} = %{y:.4f}<extra></extra>",
    )
    figure.add_scatter(
        x=steps,
        y=[finite(entry.lambda_) for entry in history],
        name="λ",
        customdata=labels([entry.name for entry in history]),
        mode="lines+markers",
        line={"color": BLUE, "width": 2.5},
        marker={"size": 8},
        hovertemplate="step %{x}: %{customdata}<br>λ = %{y:.4f}<extra></extra>",
    )
    return _steps(figure, len(steps), "scaling factor")


def norms(history: Sequence[Expert]) -> go.Figure:
    """‖Δ_t‖, its running mean n_t, and ‖merged − base‖ after each step."""
    steps = list(range(1, len(history) + 1))
    figure = go.Figure()
    figure.add_bar(
        x=steps,
        y=[entry.norm for entry in history],
        name="‖Δ‖ of the expert",
        customdata=labels([entry.name for entry in history]),
        marker={"color": "#a9c4f2", "line": {"width": 0}},
        hovertemplate="step %{x}: %{customdata}<br>‖Δ‖ = %{y:.5g}<extra></extra>",
    )

    def line(name: str, symbol: str, values: Sequence[float | None], **style: Any) -> None:
        figure.add_scatter(
            x=steps,
            y=values,
            name=name,
            mode="lines+markers",
            line={"width": 2.5, **style},
            marker={"size": 7},
            hovertemplate=f"after step %{{x}}<br>{symbol} = %{{y:.5g}}<extra></extra>",
        )

    line("n, their mean", "n", [entry.mean_norm for entry in history], color=GREY, dash="dash")
    if any(entry.distance is not None for entry in history):
        line("‖merged − base‖", "‖merged − base‖", [entry.distance for entry in history], color=ORANGE)
    figure.update_layout(bargap=0.35)
    return _steps(figure, len(steps), "norm").update_yaxes(rangemode="tozero")


def similarity(similarity: Similarity) -> go.Figure:
    """The cosine matrix. Colours are for the cosines between different experts; the diagonal is one."""
    names = labels(similarity.experts)
    others = [[None if i == j else value for j, value in enumerate(row)] for i, row in enumerate(similarity.cosines)]
    limit = max([0.05, *(abs(value) for row in others for value in row if value is not None)])
    figure = _matrix(others, names, names, "cosine", "%{y} · %{x}<br>cosine %{z:.4f}", cells=".2f")
    return figure.update_traces(zmin=-limit, zmax=limit, colorscale=DIVERGING, meta="diverging")


def survival(survival: Survival, became: Literal["entered", "held"] = "entered") -> go.Figure:
    """The share of each expert that entered the state, or is held by a ledger: experts × layers (or tensors), and all
    of them together."""
    shares = [[total, None, *kept] for total, kept in zip(survival.together, survival.kept, strict=True)]
    columns = labels(["together", " ", *short_names(survival.parts)])
    quantity = "share kept" if became == "entered" else "share held"
    figure = _matrix(shares, labels(survival.experts), columns, quantity, f"%{{y}}, %{{x}}<br>%{{z:.1%}} {became}")
    least = min(value for row in survival.kept for value in row)
    figure.update_traces(zmin=min(0.9, math.floor(least * 10) / 10), zmax=1)
    return figure.update_traces(colorbar={"tickformat": ".0%"})


def protected(survival: Survival) -> go.Figure:
    """The number of protected directions q when each expert came: experts × layers (or tensors)."""
    most = max((q for row in survival.protected for q in row if q is not None), default=0)
    hover = "%{y}, %{x}<br>%{z:.1f} directions protected"
    figure = _matrix(survival.protected, labels(survival.experts), labels(short_names(survival.parts)), "q", hover)
    return figure.update_traces(zmin=0, zmax=max(most, 1))


def held(holding: Survival) -> go.Figure:
    """The share of each expert that its entry in a ledger holds now."""
    return survival(holding, "held")


def damage(facts: LedgerFacts) -> go.Figure:
    """The predicted damage of each expert, and from where on it is served badly."""
    names = labels(facts.experts)
    figure = go.Figure()
    figure.add_bar(
        x=names,
        y=facts.damage,
        marker={"color": [ORANGE if (value or 0) > DAMAGED else BLUE for value in facts.damage], "line": {"width": 0}},
        hovertemplate="%{x}<br>predicted damage %{y:.4f}<extra></extra>",
    )
    figure.update_layout(meta={"least_width": 80 + 22 * len(names)})
    figure.add_hline(y=DAMAGED, line={"color": GREY, "dash": "dash", "width": 2})
    figure.update_xaxes(type="category", tickangle=-45, automargin=True)
    figure.update_yaxes(title="predicted damage", rangemode="tozero", zeroline=False)
    return figure.update_layout(height=360, bargap=0.35, margin={"l": 64, "r": 16, "t": 24, "b": 16}, showlegend=False)


def layer_damage(facts: LedgerFacts) -> go.Figure:
    """The predicted damage, experts × layers."""
    found = facts.interference
    hover = "%{y}, %{x}<br>predicted damage %{z:.4f}"
    figure = _matrix(found.layer_damage, labels(found.experts), labels(short_names(found.layers)), "damage", hover)
    return figure.update_traces(zmin=0, zmax=_largest(found.layer_damage))


def overlap(facts: LedgerFacts) -> go.Figure:
    """How much experts answer to the same inputs. Colours are for different experts; an expert's own is one."""
    others = [[None if i == j else value for j, value in enumerate(row)] for i, row in enumerate(facts.overlap)]
    hover = "%{y} · %{x}<br>overlap %{z:.4f}"
    names = labels(facts.experts)
    figure = _matrix(others, names, names, "overlap", hover, cells=".2f")
    return figure.update_traces(zmin=0, zmax=_largest(others))


def layer_overlap(facts: LedgerFacts) -> go.Figure:
    """The largest overlap of each expert with another one, experts × layers."""
    hover = "%{y}, %{x}<br>overlap %{z:.4f} with %{customdata}"
    layers = labels(short_names(facts.interference.layers))
    figure = _matrix(facts.layer_overlap, labels(facts.experts), layers, "largest overlap", hover)
    partners = [[label(partner or "") for partner in row] for row in facts.layer_partner]
    return figure.update_traces(zmin=0, zmax=_largest(facts.layer_overlap), customdata=partners)


def against_experts(tasks: Sequence[TaskScore], metric: str) -> go.Figure:
    """A line for each task, from what the merged model scores to what the task's expert does alone."""
    names = labels([task.task for task in tasks])
    merged, experts = [task.merged for task in tasks], [task.expert for task in tasks]
    base = [task.base for task in tasks]
    form = _form([merged, experts, base])
    figure = go.Figure()
    gaps = [[one, other, None] for one, other in zip(merged, experts, strict=True)]
    figure.add_scatter(
        x=[value for gap in gaps for value in gap],
        y=[name for name in names for _ in range(3)],
        mode="lines",
        line={"color": "#a9c4f2", "width": 5},
        showlegend=False,
        hoverinfo="skip",
    )
    points = {
        "base": (base, GREY, "circle-open"),
        "merged": (merged, BLUE, "circle"),
        "expert alone": (experts, ORANGE, "diamond"),
    }
    for name, (values, colour, symbol) in points.items():
        if any(value is not None for value in values):
            figure.add_scatter(
                x=values,
                y=names,
                name=name,
                mode="markers",
                marker={"color": colour, "symbol": symbol, "size": 11},
                hovertemplate=f"%{{y}}<br>{name} %{{x:{form}}}<extra></extra>",
            )
    figure.update_xaxes(title=label(metric), tickformat=".0%" if form == ".1%" else None, zeroline=False)
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    return figure.update_layout(
        height=120 + 22 * max(len(tasks), 3),
        margin={"l": 16, "r": 16, "t": 36, "b": 48},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    )


def scores(scores: Scores, first: int = 1) -> go.Figure:
    """The accuracy matrix: the score on each task after each step. Below the diagonal are tasks seen before.

    ``first`` is the number of the first step.
    """
    rows = {f"after step {i}": row for i, row in enumerate(scores.matrix, first)}
    if scores.base:
        rows = {"base": scores.base, **rows}
    if scores.experts:
        rows["experts alone"] = scores.experts
    form = _form(rows.values())
    metric = label(scores.metric)
    hover = f"%{{x}}, %{{y}}<br>{metric.replace('%{', '% {')} %{{z:{form}}}"
    cells = ".0%" if form == ".1%" else ".3g"
    figure = _matrix(list(rows.values()), list(rows), labels(scores.tasks), metric, hover, cells=cells)
    return figure.update_traces(colorbar={"tickformat": cells})


def _form(rows: Iterable[Sequence[float | None]]) -> str:
    """How scores are written: as shares where all may be."""
    return ".1%" if all(value is None or 0 <= value <= 1 for row in rows for value in row) else ".4g"


def label(text: str) -> str:
    """A name as plotly writes it: short, and with nothing that it would take for a tag."""
    return escape(one_line(text, LONGEST_NAME), quote=False)


def labels(names: Sequence[str]) -> list[str]:
    """The same of many, each another: plotly takes those that are the same for one."""
    found: dict[str, None] = {}
    for shown in map(label, names):
        while shown in found:
            shown += "′"
        found[shown] = None
    return list(found)


def short_names(names: Sequence[str]) -> list[str]:
    """Without the path that all have in common."""
    split = [name.split(".") for name in names]
    common = 0
    while len(names) > 1 and all(len(parts) > common + 1 and parts[common] == split[0][common] for parts in split):
        common += 1
    return [".".join(parts[common:]) for parts in split]


def _largest(values: Sequence[Sequence[float | None]]) -> float:
    """Where the colours of a matrix end; a little of all is no reason for the darkest."""
    return max([0.05, *(value for row in values for value in row if value is not None)])


def _steps(figure: go.Figure, steps: int, title: str) -> go.Figure:
    figure.update_xaxes(title="experts absorbed, t", range=[0.5, max(steps, 4) + 0.5], zeroline=False)
    figure.update_xaxes(dtick=1 if steps <= 10 else None)
    figure.update_yaxes(title=title, zeroline=False)
    return figure.update_layout(
        height=360,
        margin={"l": 64, "r": 16, "t": 24, "b": 56},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    )


def _matrix(
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    quantity: str,
    hover: str,
    *,
    cells: str | None = None,
) -> go.Figure:
    """A heat map with rows of one height, whatever room the names of the columns take below them; up to some
    columns, its cells carry their values in the form ``cells``. Where the page is too narrow for it, it scrolls."""
    height = 28 * min(max(len(rows), 2), TALLEST)
    names = 16 + 5 * max(map(len, columns), default=0)
    written = cells if len(columns) <= MOST_LABELLED else None
    column = 36 if written else 14 if len(columns) <= MOST_SEPARATED else 4
    figure = go.Figure(
        go.Heatmap(
            x=list(columns),
            y=list(rows),
            z=values,
            colorscale=SEQUENTIAL,
            colorbar={
                **{"title": {"text": quantity, "side": "top"}, "thickness": 10, "outlinewidth": 0, "nticks": 4},
                **{"orientation": "h", "lenmode": "pixels", "len": 180, "x": 0, "xanchor": "left"},
                **{"xpad": 0, "y": 1, "yanchor": "bottom"},
            },
            hovertemplate=f"{hover}<extra></extra>",
            hoverongaps=False,
            xgap=1 if len(columns) <= MOST_SEPARATED else 0,
            ygap=1,
            meta="sequential",
        )
    )
    if written:
        text = [["" if value is None else format(value, written) for value in row] for row in values]
        figure.update_traces(text=text, texttemplate="%{text}")
    common = {"type": "category", "automargin": True, "showgrid": False, "zeroline": False, "ticks": ""}
    figure.update_xaxes(tickangle=-45, **common).update_yaxes(autorange="reversed", **common)
    return figure.update_layout(
        height=height + names + 96,
        margin={"l": 16, "r": 16, "t": 80, "b": 16},
        meta={"least_width": 90 + 4 * max(map(len, rows), default=0) + column * len(columns)},
    )
