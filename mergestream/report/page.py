"""The report as one page that needs nothing else: styles, scripts, plotly.js and all data are in it."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream import __version__
from mergestream.base.names import natural
from mergestream.escaping import SENTENCE, one_line
from mergestream.methods.scale import told_scale
from mergestream.report import figures
from mergestream.report.diagnostics import Survival
from mergestream.report.facts import Facts, shown
from mergestream.report.harness import told
from mergestream.report.ledger import DAMAGED, LedgerFacts

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
    selection: str = ""
    """Which experts it shows, where they are not all"""


def page(facts: Facts) -> str:
    """The whole page."""
    from plotly.offline import get_plotlyjs

    plots = list(_plots(facts))
    data = {
        "figures": {plot.key: {view: _plain(figure) for view, figure in plot.figures.items()} for plot in plots},
        "tensors": _tensors(facts),
    }
    plotly, script = get_plotlyjs().replace("</script", "<\\/script"), _asset("script.js")
    return _fill(
        _asset("template.html"),
        {
            "scripts": f"{_allowed(plotly)} {_allowed(script)}",
            "style": _asset("style.css"),
            "name": _text(Path(facts.store).name or facts.store),
            "subtitle": _subtitle(facts),
            "tiles": "".join(_tiles(facts)),
            "findings": _findings(facts),
            "experts": _experts(facts),
            **_tensor_headings(facts),
            "plots": "".join(_section(plot) for plot in plots),
            "expert_options": "".join(
                f'<option value="{i}">{_text(e.name)}</option>' for i, e in enumerate(facts.shown.history)
            ),
            "facts": "".join(_definitions(facts)),
            "commands": "\n".join(map(escape, facts.commands)),
            "version": _text(__version__),
            "plotly": plotly,
            "data": _embedded(data),
            "script": script,
        },
    )


def _plots(facts: Facts) -> Iterator[Plot]:
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
        f"λ is {history[-1].lambda_:.4g} after {_experts_count(facts)}; √t is {len(history) ** 0.5:.4g}. "
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
    layers, found = ledger.holding.by_layer(), ledger.collisions
    tensors = facts.manifest.base.tensors
    weights = ledger.holding.select([tensors[name].role == "linear" for name in ledger.holding.parts])
    yield Plot(
        "held",
        "What the entries hold",
        f"The share of each task vector's squared norm that its entry holds while {_counted(ledger.room_for)} "
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
    found = ledger.collisions.largest_damage
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
        {"": figures.similarity(few)},
        ("cosine", *few.experts),
        [(name, *map(shown, row)) for name, row in zip(few.experts, few.cosines, strict=True)],
        facts.selection,
    )


def _scores(facts: Facts) -> Plot:
    scores, last = facts.scores, facts.shown.scores
    assert scores is not None and last is not None
    first = len(scores.matrix) - len(last.matrix) + 1
    caption = f"The {scores.metric} of the merged model on each task."
    if scores.acc is not None:
        caption += f" ACC, the mean after the last step, is {scores.acc:.3f}."
    if scores.bwt is not None:
        caption += f" BWT, what tasks gained since their own expert came, is {scores.bwt:+.3f}."
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


def _section(plot: Plot) -> str:
    views = list(plot.figures)
    choice, caption = "", _text(f"{plot.caption} {plot.selection}".strip())
    if len(views) > 1:
        buttons = "".join(
            f'<button type="button" data-figure="{plot.key}" data-view="{_text(view)}" '
            f'aria-pressed="{"true" if view == views[0] else "false"}">{_text(view)}</button>'
            for view in views
        )
        choice = f'<div class="choice" role="group" aria-label="What the columns are">{buttons}</div>'
    return (
        f'<section class="card plot" id="{plot.key}"><header><h2>{_text(plot.title)}</h2>{choice}</header>'
        f'<figure aria-labelledby="{plot.key}-caption">'
        f'<div class="figure" id="figure-{plot.key}" role="img" aria-label="{_text(plot.title)}: '
        f'{caption}"></div><figcaption id="{plot.key}-caption">{caption}</figcaption>'
        f"</figure><details><summary>The numbers</summary>{_table(plot.headings, plot.rows)}</details></section>"
    )


def _subtitle(facts: Facts) -> str:
    base = facts.manifest.base.source
    return (
        f"{_experts_count(facts)} merged by <strong>{_text(facts.manifest.method)}</strong> "
        f"({_text(facts.parameters) or 'no parameters'}) on {_text(Path(base).name or base)}"
    )


def _experts_count(facts: Facts) -> str:
    return _counted(len(facts.history))


def _counted(experts: int) -> str:
    return f"{experts} expert{'' if experts == 1 else 's'}"


def _tiles(facts: Facts) -> Iterator[str]:
    def tile(value: str, label: str, hint: str) -> str:
        return f'<div class="tile"><dt>{_text(label)}</dt><dd>{_text(value)}<p>{_text(hint)}</p></dd></div>'

    if not facts.history:
        yield tile("0", "experts", "add one: mergestream add")
        return
    last, count = facts.history[-1], len(facts.history)
    yield tile(str(count), "experts", f"the last: {last.name}")
    if facts.ledger:
        share, name = min(zip(facts.ledger.held, facts.ledger.experts, strict=True))
        yield tile(f"{share:.0%}", "least held", name)
        if damaged := facts.ledger.collisions.largest_damage:
            yield tile(f"{damaged[0]:.2f}", "largest damage", damaged[1])
    else:
        name, scale = told_scale(facts.manifest.method, last.scale)
        hint = f"√{count} = {count**0.5:.3g}" if facts.manifest.is_opcm else "of the merged task vector"
        yield tile(f"{scale:.3g}", name, hint)
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
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in facts.findings())
    return items and f'<section class="card findings"><h2>Worth a look</h2><ul>{items}</ul></section>'


def _experts(facts: Facts) -> str:
    outcome = ("held", "damage", "collides most") if facts.ledger else ("kept", told_scale(facts.manifest.method, 1)[0])
    headings = ("step", "expert", "added", "‖Δ‖", *outcome, "most similar", "gates", "digest")
    rows = "".join(_expert(facts, number, entry) for number, entry in enumerate(facts.history, 1))
    head = "".join(
        f'<th scope="col" aria-sort="{"ascending" if i == 0 else "none"}"><button type="button">{h}</button></th>'
        for i, h in enumerate(headings)
    )
    return f'<table class="sortable timeline"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _expert(facts: Facts, number: int, entry: Expert) -> str:
    nearest = facts.nearest(number)
    outcome = _of_ledger(facts.ledger, number - 1) if facts.ledger else _of_state(facts, entry)
    gates = "".join(
        f'<span class="badge" title="found: {shown(gate["value"])}">✓ {_text(gate["gate"])}</span>'
        for gate in entry.gates
    )
    if entry.evaluation:
        gates += f'<span class="badge">score {_text(told(entry.evaluation))}</span>'
    when = entry.added.replace("T", " ").replace("+00:00", "")
    return (
        f'<tr><td data-sort="{number}"><span class="dot">{number}</span></td>'
        f'<th scope="row" title="{_text(entry.source)}">{_text(entry.name)}</th>'
        f'<td data-sort="{_text(entry.added)}"><time datetime="{_text(entry.added)}">{_text(when)}</time></td>'
        f'<td data-sort="{entry.norm}">{entry.norm:.4g}</td>'
        f"{outcome}{_companion(nearest)}"
        f"<td>{gates or '–'}</td>"
        f'<td><code title="{_text(entry.digest)}">{_text(entry.digest[:12])}</code></td></tr>'
    )


def _of_state(facts: Facts, entry: Expert) -> str:
    _, scale = told_scale(facts.manifest.method, entry.scale)
    return f'{_share(entry.kept)}<td data-sort="{scale}">{scale:.4g}</td>'


def _of_ledger(ledger: LedgerFacts, expert: int) -> str:
    damage, closest = ledger.damage[expert], ledger.collisions.closest(expert)
    return (
        f"{_share(ledger.held[expert])}"
        f'<td data-sort="{-1 if damage is None else damage}">{shown(damage)}</td>'
        f"{_companion(closest and (closest[1], closest[0]))}"
    )


def _share(share: float) -> str:
    return (
        f'<td data-sort="{share}"><span class="bar" style="--share:{share:.4f}"></span>'
        f'<span class="share">{share:.1%}</span></td>'
    )


def _companion(found: tuple[str, float] | None) -> str:
    """Another expert, and how close it is."""
    if found is None:
        return '<td data-sort="-2">–</td>'
    name, value = found
    return f'<td data-sort="{value}">{_text(name)} <span class="muted">{value:.3f}</span></td>'


def _definitions(facts: Facts) -> Iterator[str]:
    manifest = facts.manifest
    pairs = [
        *(("store", facts.store), ("method", manifest.method)),
        *((f"· {key}", str(value)) for key, value in manifest.parameters.items()),
        *(("base", manifest.base.source), ("base digest", manifest.base.digest)),
    ]
    if facts.history and not facts.ledger:  # which has a digest for each entry, and none of them all
        pairs.append(("state digest", facts.history[-1].state))
    for term, meaning in pairs:
        yield f"<div><dt>{_text(term)}</dt><dd>{_text(meaning)}</dd></div>"


def _tensors(facts: Facts) -> dict[str, Any]:
    """The table of tensors: their forms; ‖Δ‖, the share kept and q in the order of ``merged``, for all experts together
    and for each that is shown."""
    merged = {name: i for i, name in enumerate(facts.survival.parts)}
    few = facts.shown.survival

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
        "together": rounded(_together(facts.survival)),
        "norm": rounded(few.norm),
        "kept": rounded(few.kept),
        "protected": None if facts.ledger else few.protected,
    }


def _together(survival: Survival) -> tuple[list[float], list[float]]:
    """Of each tensor, over all experts: the root mean square of ‖Δ‖, and the share of all energy that was kept."""
    norms, shares = [], []
    for norm, kept in zip(zip(*survival.norm, strict=True), zip(*survival.kept, strict=True), strict=True):
        energy = math.fsum(value**2 for value in norm)
        held = math.fsum(share * value**2 for share, value in zip(kept, norm, strict=True))
        norms.append(math.sqrt(energy / len(norm)))
        shares.append(held / energy if energy else 1.0)
    return norms, shares


def _tensor_headings(facts: Facts) -> dict[str, str]:
    """What the table of tensors calls the share of an expert, and its last column, which a ledger has not."""
    if facts.ledger:
        return {"share": "held", "protected": "", "and_protected": ""}
    heading = '<th scope="col" aria-sort="none"><button type="button">q</button></th>'
    return {"share": "kept", "protected": heading, "and_protected": ", and q that of the last step"}


def _text(text: str) -> str:
    """For HTML, whatever the names in it are."""
    return escape(one_line(text, SENTENCE))


def _table(headings: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f'<th scope="col">{_text(str(cell))}</th>' for cell in headings)
    body = "".join(
        f'<tr><th scope="row">{_text(str(row[0]))}</th>'
        + "".join(f"<td>{_text(str(cell))}</td>" for cell in row[1:])
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


def _allowed(script: str) -> str:
    """How a content security policy names a script that is in the page: no other one runs."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _fill(template: str, parts: dict[str, str]) -> str:
    """Put the parts in place of ``{{name}}``; what they contain is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
