"""The report as a page and as Markdown, from templates."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mergestream import __version__
from mergestream.base.names import natural
from mergestream.escaping import MAX_SENTENCE, code, markdown_text, one_line
from mergestream.report.facts import Facts
from mergestream.report.sections import MAX_EXPERTS, make_sections
from mergestream.report.verdict import next_step, verdict


def render_html(facts: Facts) -> str:
    """One page that needs nothing else: styles, scripts and all data are in it."""
    script = _template("script.js")
    policy = b64encode(sha256(script.encode()).digest()).decode()
    return (
        _environment(lambda text: one_line(text, MAX_SENTENCE))
        .get_template("report.html")
        .render(
            **_context(facts),
            name=Path(facts.store).name or facts.store,
            base=Path(facts.manifest.base.source).name or facts.manifest.base.source,
            is_large=len(facts.history) > MAX_EXPERTS,
            style=Markup(_template("style.css")),
            script=Markup(script),
            script_hash=Markup(f"'sha256-{policy}'"),
            data=Markup(json.dumps(_tensor_rows(facts), allow_nan=False).replace("<", "\\u003c")),
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


def _tensor_rows(facts: Facts) -> list[list[Any]]:
    """The table of tensors: what the base has, then ‖Δ‖ and the share kept over all experts."""
    survival, outcome = facts.survival, {}
    by_tensor = (zip(*rows, strict=True) for rows in (survival.norm, survival.kept))  # both empty without experts
    for name, norms, shares in zip(survival.parts, *by_tensor, strict=False):
        energy = math.fsum(norm**2 for norm in norms)
        kept = math.fsum(share * norm**2 for share, norm in zip(shares, norms, strict=True))
        numbers = math.sqrt(energy / len(norms)), kept / energy if energy else 1.0
        outcome[name] = [float(f"{value:.6g}") for value in numbers]
    return [
        [
            *(name, tensor.role, tensor.rule, tensor.dtype, "×".join(map(str, tensor.shape)) or "scalar"),
            *(tensor.numel, tensor.norm, *outcome.get(name, (None, None))),
        ]
        for name, tensor in sorted(facts.manifest.base.tensors.items(), key=lambda item: natural(item[0]))
    ]


def _template(name: str) -> str:
    return (files("mergestream.report") / "templates" / name).read_text(encoding="utf-8")
