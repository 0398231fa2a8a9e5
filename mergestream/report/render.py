"""The report as a page and as Markdown, from templates."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Callable, Iterable
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mergestream import __version__
from mergestream.base.names import natural
from mergestream.errors import MergestreamError
from mergestream.escaping import MAX_SENTENCE, code, markdown_text, one_line
from mergestream.report.diagnostics import MAX_EXPERTS, Survival
from mergestream.report.facts import Facts
from mergestream.report.sections import Section, make_sections, make_tiles
from mergestream.report.verdict import next_step, verdict
from mergestream.report.wording import short_names

MAX_NUMBERS = 50_000
"""Norms of single tensors that are in the page for single experts; of larger models only those for all experts"""


def render_html(facts: Facts) -> str:
    """One page that needs nothing else: styles, scripts, figures and all data are in it."""
    script = _template("script.js")
    policy = b64encode(sha256(script.encode()).digest()).decode()
    return (
        _environment(lambda text: one_line(text, MAX_SENTENCE), svg=_draw)
        .get_template("report.html")
        .render(
            **_context(facts),
            name=Path(facts.store).name or facts.store,
            base=Path(facts.manifest.base.source).name or facts.manifest.base.source,
            tiles=list(make_tiles(facts)),
            is_large=len(facts.history) > MAX_EXPERTS,
            definitions=_definitions(facts),
            selected=short_names(facts.select(facts.manifest.names)) if _lists_experts(facts) else [],
            style=Markup(_template("style.css")),
            script=Markup(script),
            script_hash=Markup(f"'sha256-{policy}'"),
            data=Markup(json.dumps(_tensor_data(facts), allow_nan=False).replace("<", "\\u003c")),
            version=__version__,
        )
    )


def render_markdown(facts: Facts) -> str:
    """The same sections as text."""
    clean = lambda text: Markup(markdown_text(text, MAX_SENTENCE))  # noqa: E731
    return _environment(clean, code=lambda text: Markup(code(text))).get_template("report.md").render(_context(facts))


def _environment(clean: Callable[[str], str], **filters: Callable[..., Any]) -> Environment:
    """Templates in which every value passes through ``clean`` and is then escaped, unless it is markup already."""
    environment = Environment(
        loader=PackageLoader("mergestream.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else clean(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= filters
    return environment


def _context(facts: Facts) -> dict[str, Any]:
    return {
        "facts": facts,
        "verdict": verdict(facts),
        "next_step": next_step(facts),
        "sections": make_sections(facts),
    }


def _draw(section: Section) -> Markup:
    try:
        from mergestream.report import figures
    except ImportError as error:
        raise MergestreamError("figures need matplotlib; pip install 'mergestream[report]'") from error
    assert section.figure is not None
    name, data = section.figure
    return Markup(figures.inline_svg(getattr(figures, name)(data)))


def _definitions(facts: Facts) -> list[tuple[str, str]]:
    manifest = facts.manifest
    found = [
        ("store", facts.store),
        ("method", manifest.method),
        *((f"· {key}", str(value)) for key, value in manifest.parameters.items()),
        ("base", manifest.base.source),
        ("base digest", manifest.base.digest),
    ]
    if facts.history and not facts.ledger:  # a ledger has one digest for each entry
        found.append(("state digest", facts.history[-1].state))
    return found


def _lists_experts(facts: Facts) -> bool:
    """Whether the table of tensors has the numbers of single experts."""
    return len(facts.selected) * len(facts.survival.parts) <= MAX_NUMBERS


def _tensor_data(facts: Facts) -> dict[str, Any]:
    """The table of tensors; ‖Δ‖, the share kept and q for all experts, and for each selected expert."""
    positions = {name: i for i, name in enumerate(facts.survival.parts)}
    survival, last = facts.survival, facts.survival.protected[-1] if facts.history else ()
    select = facts.select if _lists_experts(facts) else lambda rows: []

    def rounded(rows: Iterable[Iterable[float]]) -> list[list[float]]:
        return [[float(f"{value:.6g}") for value in row] for row in rows]

    return {
        "rows": [
            [
                *(name, tensor.role, tensor.rule, tensor.dtype, "×".join(map(str, tensor.shape)) or "scalar"),
                *(tensor.numel, tensor.norm, positions.get(name, -1)),
            ]
            for name, tensor in sorted(facts.manifest.base.tensors.items(), key=lambda item: natural(item[0]))
        ],
        "total": [*rounded(_sum_up(facts.survival)), None if facts.ledger else last],
        "norm": rounded(select(survival.norm)),
        "kept": rounded(select(survival.kept)),
        "protected": None if facts.ledger else select(survival.protected),
    }


def _sum_up(survival: Survival) -> tuple[list[float], list[float]]:
    """For each tensor, over all experts: the root mean square of ‖Δ‖, and the share of all energy that was kept."""
    norms, shares = [], []
    for norm, kept in zip(zip(*survival.norm, strict=True), zip(*survival.kept, strict=True), strict=True):
        energy = math.fsum(value**2 for value in norm)
        held = math.fsum(share * value**2 for share, value in zip(kept, norm, strict=True))
        norms.append(math.sqrt(energy / len(norm)))
        shares.append(held / energy if energy else 1.0)
    return norms, shares


def _template(name: str) -> str:
    return (files("mergestream.report") / "templates" / name).read_text(encoding="utf-8")
