"""The report as one page that needs nothing else: styles, scripts, plotly.js and all data are in it."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream import __version__
from mergestream.base.names import natural
from mergestream.escaping import MAX_SENTENCE, one_line
from mergestream.methods.scale import displayed_scale
from mergestream.report.diagnostics import MOST_SHOWN, Survival, few
from mergestream.report.facts import Facts, shown
from mergestream.report.harness import told
from mergestream.report.ledger import LedgerFacts
from mergestream.report.plots import Plot, against_experts, plots
from mergestream.report.verdict import bwt_in_words, signed, verdict
from mergestream.sizes import counted

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from mergestream.store import Expert


def page(facts: Facts) -> str:
    """The whole page."""
    from plotly.offline import get_plotlyjs

    first, others = against_experts(facts), list(plots(facts))
    data = {
        "figures": {
            plot.key: {view: _plain(figure) for view, figure in plot.figures.items()}
            for plot in (*([first] if first else []), *others)
        },
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
            "verdict": _text(verdict(facts)),
            "tiles": "".join(_tiles(facts)),
            "against": _section(first) if first else "",
            "findings": _list("findings", "Worth a look", facts.findings()),
            "conflicts": _list("conflicts", "Conflicts", few(map(str, facts.conflicts))),
            "experts": _experts(facts),
            "expert_search": _expert_search(facts),
            **_tensor_headings(facts),
            "plots": "".join(map(_section, others)),
            "expert_options": "".join(
                f'<option value="{i}">{_text(e.name)}</option>' for i, e in enumerate(facts.shown.history)
            ),
            "facts": "".join(_definitions(facts)),
            "commands": _commands(facts),
            "version": _text(__version__),
            "plotly": plotly,
            "data": _embedded(data),
            "script": script,
        },
    )


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
        f'<section class="card plot{" wide" if plot.wide else ""}" id="{plot.key}">'
        f"<header><h2>{_text(plot.title)}</h2>{choice}</header>"
        f'<figure aria-labelledby="{plot.key}-caption">'
        f'<div class="scroll"><div class="figure" id="figure-{plot.key}" role="img" aria-label="{_text(plot.title)}: '
        f'{caption}"></div></div><figcaption id="{plot.key}-caption">{caption}</figcaption>'
        f"</figure><details><summary>The numbers</summary>{_table(plot.headings, plot.rows)}</details></section>"
    )


def _subtitle(facts: Facts) -> str:
    base = facts.manifest.base.source
    return (
        f"{counted(len(facts.history), 'expert')} merged by <strong>{_text(facts.manifest.method)}</strong> "
        f"({_text(facts.parameters) or 'no parameters'}) on {_text(Path(base).name or base)}"
    )


def _tiles(facts: Facts) -> Iterator[str]:
    def tile(value: str, label: str, hint: str, tone: str = "") -> str:
        shown = f"<dt>{_text(label)}</dt><dd{tone}>{_text(value)}<p>{_text(hint)}</p></dd>"
        return f'<div class="tile">{shown}</div>'

    if not facts.history:
        yield tile("0", "experts", "add one: mergestream add")
        return
    last, count = facts.history[-1], len(facts.history)
    yield tile(str(count), "experts", f"the last: {last.name}")
    if facts.ledger:
        share, name = min(zip(facts.ledger.held, facts.ledger.experts, strict=True))
        yield tile(f"{share:.0%}", "least held", name)
        if damaged := facts.ledger.interference.largest_damage:
            yield tile(f"{damaged[0]:.2f}", "largest damage", damaged[1])
    else:
        name, scale = displayed_scale(facts.manifest.method, last.scale)
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
        bwt = facts.scores.bwt
        yield tile(signed(bwt), "BWT", bwt_in_words(bwt), f' class="{"lost" if bwt < 0 else "won"}"')


def _list(kind: str, title: str, sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
    return items and f'<section class="card {kind}"><h2>{title}</h2><ul>{items}</ul></section>'


def _experts(facts: Facts) -> str:
    outcome = (
        ("held", "damage", "collides most") if facts.ledger else ("kept", displayed_scale(facts.manifest.method, 1)[0])
    )
    headings = ("step", "expert", "added", "‖Δ‖", *outcome, "most similar", "gates", "digest")
    rows = "".join(_expert(facts, number, entry, headings) for number, entry in enumerate(facts.history, 1))
    head = "".join(
        f'<th scope="col" aria-sort="{"ascending" if i == 0 else "none"}"><button type="button">{h}</button></th>'
        for i, h in enumerate(headings)
    )
    table = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    many = " tall" if len(facts.history) > MOST_SHOWN else ""
    return f'<div class="scroll{many}"><table class="sortable timeline" id="expert-table">{table}</table></div>'


def _expert_search(facts: Facts) -> str:
    """Where they are many."""
    if len(facts.history) <= MOST_SHOWN:
        return ""
    box = '<input type="search" id="expert-search" data-table="expert-table" placeholder="name" autocomplete="off">'
    count = '<output id="expert-count" for="expert-search" aria-live="polite"></output>'
    return f'<div class="controls"><label>Search {box}</label>{count}</div>'


def _expert(facts: Facts, number: int, entry: Expert, headings: Sequence[str]) -> str:
    """A row; on a small screen it stands on its own, so that every cell knows its heading."""
    nearest = facts.nearest(number)
    outcome = _of_ledger(facts.ledger, number - 1) if facts.ledger else _of_state(facts, entry)
    gates = "".join(
        f'<span class="badge" title="found: {shown(gate["value"])}">✓ {_text(gate["gate"])}</span>'
        for gate in entry.gates
    )
    if entry.evaluation:
        gates += f'<span class="badge">score {_text(told(entry.evaluation))}</span>'
    when = entry.added.replace("T", " ").replace("+00:00", "")
    cells = (
        (entry.added, f'<time datetime="{_text(entry.added)}">{_text(when)}</time>'),
        (entry.norm, f"{entry.norm:.4g}"),
        *outcome,
        _companion(nearest),
        (len(entry.gates), gates or "–"),
        (entry.digest, f'<code title="{_text(entry.digest)}">{_text(entry.digest[:12])}</code>'),
    )
    return (
        f'<tr data-text="{_text(entry.name.lower())}">'
        f'<td data-sort="{number}"><span class="dot">{number}</span></td>'
        f'<th scope="row" title="{_text(entry.source)}">{_text(entry.name)}</th>'
        + "".join(
            f'<td data-label="{heading}" data-sort="{_text(str(sort))}">{content}</td>'
            for heading, (sort, content) in zip(headings[2:], cells, strict=True)
        )
        + "</tr>"
    )


Cell = tuple[float | str, str]
"""What a cell is sorted by, and what is in it"""


def _of_state(facts: Facts, entry: Expert) -> tuple[Cell, ...]:
    _, scale = displayed_scale(facts.manifest.method, entry.scale)
    return _share(entry.kept), (scale, f"{scale:.4g}")


def _of_ledger(ledger: LedgerFacts, expert: int) -> tuple[Cell, ...]:
    damage, closest = ledger.damage[expert], ledger.interference.closest(expert)
    found = _companion(closest and (closest[1], closest[0]))
    return _share(ledger.held[expert]), ("" if damage is None else damage, shown(damage)), found


def _share(share: float) -> Cell:
    bar = f'<span class="bar" style="--share:{share:.4f}"></span>'
    return share, f'{bar}<span class="share">{share:.1%}</span>'


def _companion(found: tuple[str, float] | None) -> Cell:
    """Another expert, and how close it is."""
    if found is None:
        return "", "–"
    name, value = found
    return value, f'<span class="name">{_text(name)}</span> <span class="muted">{value:.3f}</span>'


def _commands(facts: Facts) -> str:
    """That make the store again; folded where they are many."""
    lines = "\n".join(map(escape, facts.commands))
    block = f'<pre tabindex="0"><code>{lines}</code></pre>'
    if len(facts.commands) <= MOST_SHOWN:
        return f"<h3>Commands</h3>{block}"
    return f"<details><summary>All {len(facts.commands)} commands</summary>{block}</details>"


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
    return escape(one_line(text, MAX_SENTENCE))


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
