"""The report as one page that needs nothing else: styles, scripts, plotly.js and all data are in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream import __version__
from mergestream.base.names import natural
from mergestream.report import figures
from mergestream.report.diagnostics import Survival
from mergestream.report.facts import Facts, shown

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from mergestream.store import Expert


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


def page(facts: Facts) -> str:
    """The whole page."""
    from plotly.offline import get_plotlyjs

    plots = list(_plots(facts))
    data = {
        "figures": {plot.key: {view: _plain(figure) for view, figure in plot.figures.items()} for plot in plots},
        "tensors": _tensors(facts),
    }
    return _fill(
        _asset("template.html"),
        {
            "style": _asset("style.css"),
            "name": escape(Path(facts.store).name or facts.store),
            "subtitle": _subtitle(facts),
            "tiles": "".join(_tiles(facts)),
            "findings": _findings(facts),
            "experts": _experts(facts),
            "plots": "".join(_section(plot) for plot in plots),
            "expert_options": "".join(
                f'<option value="{i}">{escape(e.name)}</option>' for i, e in enumerate(facts.history)
            ),
            "facts": "".join(_definitions(facts)),
            "commands": escape("\n".join(facts.commands)),
            "version": escape(__version__),
            "plotly": get_plotlyjs().replace("</script", "<\\/script"),
            "data": _embedded(data),
            "script": _asset("script.js"),
        },
    )


def _plots(facts: Facts) -> Iterator[Plot]:
    history = facts.history
    if not history:
        return
    last = history[-1]
    yield Plot(
        "scaling",
        "Scaling factor",
        f"λ is {last.lambda_:.4g} after {_experts_count(facts)}; √t is {len(history) ** 0.5:.4g}. "
        "Task vectors that are orthogonal and equally long give λ = √t.",
        {"": figures.scaling(history)},
        ("step", "expert", "λ", "√t"),
        [(step, e.name, f"{e.lambda_:.4f}", f"{step**0.5:.4f}") for step, e in enumerate(history, 1)],
    )
    distance = "" if last.distance is None else f"The merged model is {last.distance:.4g} away from the base. "
    yield Plot(
        "norms",
        "Distance to the base",
        f"{distance}The experts are {last.mean_norm:.4g} away from it in the mean.",
        {"": figures.norms(history)},
        ("step", "expert", "‖Δ‖", "n", "‖merged − base‖"),
        [
            (step, e.name, f"{e.norm:.5g}", f"{e.mean_norm:.5g}", shown(e.distance, ".5g"))
            for step, e in enumerate(history, 1)
        ],
    )
    if len(history) > 1:
        yield _similarity(facts)
    if facts.scores:
        yield _scores(facts)
    layers, weights = facts.survival.by_layer(), facts.survival.select(facts.survival.projected)
    yield Plot(
        "survival",
        "What survived of each expert",
        _least(layers),
        _views(figures.survival, layers, weights),
        ("layer", *layers.experts),
        [
            (layer, *(f"{row[i]:.1%}" for row in layers.kept))
            for i, layer in enumerate(figures.short_names(layers.parts))
        ],
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
        )


def _views(draw: Any, layers: Survival, weights: Survival) -> dict[str, go.Figure]:
    views = {"layers": draw(layers)}
    if weights.parts and weights.parts != layers.parts:
        views["linear weights"] = draw(weights)
    return views


def _similarity(facts: Facts) -> Plot:
    found = facts.similarity
    pairs = [
        (value, found.experts[i], found.experts[j])
        for i, row in enumerate(found.cosines)
        for j, value in enumerate(row[:i])
        if value is not None
    ]
    caption = f"Estimated from sketches, to {found.standard_error:.3f} (standard error)."
    if pairs:
        value, one, other = max(pairs)
        mean = sum(abs(pair[0]) for pair in pairs) / len(pairs)
        caption = f"The most similar are {other} and {one} ({value:.3f}); the mean magnitude is {mean:.3f}. {caption}"
    return Plot(
        "similarity",
        "Similarity of the experts",
        caption,
        {"": figures.similarity(found)},
        ("cosine", *found.experts),
        [(name, *map(shown, row)) for name, row in zip(found.experts, found.cosines, strict=True)],
    )


def _scores(facts: Facts) -> Plot:
    scores = facts.scores
    assert scores is not None
    caption = f"The {scores.metric} of the merged model on each task."
    if scores.acc is not None:
        caption += f" ACC, the mean after the last step, is {scores.acc:.3f}."
    if scores.bwt is not None:
        caption += f" BWT, what tasks gained since their own expert came, is {scores.bwt:+.3f}."
    return Plot(
        "scores",
        "Scores after each step",
        caption,
        {"": figures.scores(scores)},
        ("after step", *scores.tasks),
        [(number, *map(shown, row)) for number, row in enumerate(scores.matrix, 1)],
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


def _section(plot: Plot) -> str:
    views = list(plot.figures)
    choice = ""
    if len(views) > 1:
        buttons = "".join(
            f'<button type="button" data-figure="{plot.key}" data-view="{escape(view)}" '
            f'aria-pressed="{"true" if view == views[0] else "false"}">{escape(view)}</button>'
            for view in views
        )
        choice = f'<div class="choice" role="group" aria-label="What the columns are">{buttons}</div>'
    return (
        f'<section class="card plot" id="{plot.key}"><header><h2>{escape(plot.title)}</h2>{choice}</header>'
        f'<figure aria-labelledby="{plot.key}-caption">'
        f'<div class="figure" id="figure-{plot.key}" role="img" aria-label="{escape(plot.title)}: '
        f'{escape(plot.caption)}"></div><figcaption id="{plot.key}-caption">{escape(plot.caption)}</figcaption>'
        f"</figure><details><summary>The numbers</summary>{_table(plot.headings, plot.rows)}</details></section>"
    )


def _subtitle(facts: Facts) -> str:
    base = facts.manifest.base.source
    return (
        f"{_experts_count(facts)} merged by <strong>{escape(facts.manifest.method)}</strong> "
        f"({escape(facts.parameters) or 'no parameters'}) on {escape(Path(base).name or base)}"
    )


def _experts_count(facts: Facts) -> str:
    count = len(facts.history)
    return f"{count} expert{'' if count == 1 else 's'}"


def _tiles(facts: Facts) -> Iterator[str]:
    def tile(value: str, label: str, hint: str) -> str:
        return f'<div class="tile"><dt>{escape(label)}</dt><dd>{escape(value)}<p>{escape(hint)}</p></dd></div>'

    if not facts.history:
        yield tile("0", "experts", "add one: mergestream add")
        return
    last, count = facts.history[-1], len(facts.history)
    yield tile(str(count), "experts", f"the last: {last.name}")
    yield tile(f"{last.lambda_:.3g}", "λ", f"√{count} = {count**0.5:.3g}")
    yield tile(shown(last.distance, ".3g"), "‖merged − base‖", f"mean of the experts: {last.mean_norm:.3g}")
    least = min(facts.history, key=lambda entry: entry.kept)
    yield tile(f"{least.kept:.0%}", "least kept", least.name)
    nearest = [
        (found[1], entry.name, found[0]) for i, entry in enumerate(facts.history, 1) if (found := facts.nearest(i))
    ]
    if nearest:
        value, one, other = max(nearest)
        yield tile(f"{value:.2f}", "largest cosine", f"{one} and {other}")
    if facts.scores and facts.scores.acc is not None:
        yield tile(shown(facts.scores.acc), "ACC", f"mean {facts.scores.metric} over all tasks")
    if facts.scores and facts.scores.bwt is not None:
        yield tile(f"{facts.scores.bwt:+.3f}", "BWT", "gained since each expert came")


def _findings(facts: Facts) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in facts.findings())
    return items and f'<section class="card findings"><h2>Worth a look</h2><ul>{items}</ul></section>'


def _experts(facts: Facts) -> str:
    headings = ("step", "expert", "added", "‖Δ‖", "kept", "λ", "most similar", "gates", "digest")
    rows = "".join(_expert(facts, number, entry) for number, entry in enumerate(facts.history, 1))
    head = "".join(
        f'<th scope="col" aria-sort="{"ascending" if i == 0 else "none"}"><button type="button">{h}</button></th>'
        for i, h in enumerate(headings)
    )
    return f'<table class="sortable timeline"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _expert(facts: Facts, number: int, entry: Expert) -> str:
    nearest = facts.nearest(number)
    gates = "".join(
        f'<span class="badge" title="found: {shown(gate["value"])}">✓ {escape(gate["gate"])}</span>'
        for gate in entry.gates
    )
    if entry.evaluation:
        gates += f'<span class="badge">score {entry.evaluation["score"]:g}</span>'
    similar = f'{escape(nearest[0])} <span class="muted">{nearest[1]:.3f}</span>' if nearest else "–"
    when = entry.added.replace("T", " ").replace("+00:00", "")
    return (
        f'<tr><td data-sort="{number}"><span class="dot">{number}</span></td>'
        f'<th scope="row" title="{escape(entry.source)}">{escape(entry.name)}</th>'
        f'<td data-sort="{escape(entry.added)}"><time datetime="{escape(entry.added)}">{escape(when)}</time></td>'
        f'<td data-sort="{entry.norm}">{entry.norm:.4g}</td>'
        f'<td data-sort="{entry.kept}"><span class="bar" style="--share:{entry.kept:.4f}"></span>'
        f'<span class="share">{entry.kept:.1%}</span></td>'
        f'<td data-sort="{entry.lambda_}">{entry.lambda_:.4g}</td>'
        f'<td data-sort="{nearest[1] if nearest else -2}">{similar}</td>'
        f"<td>{gates or '–'}</td>"
        f'<td><code title="{escape(entry.digest)}">{escape(entry.digest[:12])}</code></td></tr>'
    )


def _definitions(facts: Facts) -> Iterator[str]:
    manifest = facts.manifest
    pairs = [
        *(("store", facts.store), ("method", manifest.method)),
        *((f"· {key}", str(value)) for key, value in manifest.parameters.items()),
        *(("base", manifest.base.source), ("base digest", manifest.base.digest)),
    ]
    if facts.history:
        pairs.append(("state digest", facts.history[-1].state))
    for term, meaning in pairs:
        yield f"<div><dt>{escape(term)}</dt><dd>{escape(meaning)}</dd></div>"


def _tensors(facts: Facts) -> dict[str, Any]:
    """The table of tensors: their forms, and for each expert ‖Δ‖, the share kept and q in the order of ``merged``."""
    merged = {name: i for i, name in enumerate(facts.survival.parts)}

    def rounded(rows: Iterable[Iterable[float]]) -> list[list[float]]:
        return [[float(f"{value:.6g}") for value in row] for row in rows]

    return {
        "rows": [
            [
                *(name, tensor.role, tensor.rule, tensor.dtype, "×".join(map(str, tensor.shape)) or "scalar"),
                *(tensor.numel, tensor.norm, merged.get(name, -1)),
            ]
            for name, tensor in sorted(facts.manifest.base.tensors.items(), key=lambda item: natural(item[0]))
        ],
        "norm": rounded(facts.survival.norm),
        "kept": rounded(facts.survival.kept),
        "protected": facts.survival.protected,
    }


def _table(headings: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f'<th scope="col">{escape(str(cell))}</th>' for cell in headings)
    body = "".join(
        f'<tr><th scope="row">{escape(str(row[0]))}</th>'
        + "".join(f"<td>{escape(str(cell))}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _plain(figure: go.Figure) -> Any:
    """Without plotly's default template: the page gives the figures its own colours."""
    figure.update_layout(template="none")
    return json.loads(figure.to_json())


def _embedded(data: Any) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files("mergestream.report") / "assets" / name).read_text(encoding="utf-8")


def _fill(template: str, parts: dict[str, str]) -> str:
    """Put the parts in place of ``{{name}}``; what they contain is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
