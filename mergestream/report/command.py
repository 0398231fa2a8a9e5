"""The commands report and diff."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from mergestream.cli.common import open_store, print_json, print_table
from mergestream.errors import UsageError

SUFFIXES = {".html": "html", ".htm": "html", ".md": "md", ".json": "json"}


def report(arguments: Namespace) -> int:
    out = Path(arguments.out) if arguments.out else None
    form = arguments.format or (SUFFIXES.get(out.suffix.lower(), "html") if out else "html")
    if form == "html" and out is None:
        raise UsageError("say where the page is to be written: -o report.html")
    text = render(arguments, form)
    if out is None:
        print(text, end="")
        return 0
    from mergestream.files import write_text

    write_text(out, text)
    print(f"{out}: the report of {arguments.store}")
    return 0


def render(arguments: Namespace, form: str) -> str:
    import json

    from mergestream.report.facts import Facts

    facts = Facts.of(open_store(arguments))
    if form == "html":
        from mergestream.report.page import page

        return page(facts)
    if form == "md":
        from mergestream.report.markdown import markdown

        return markdown(facts)
    return json.dumps(facts.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


MOST = 20
"""Layers that are listed."""


def diff(arguments: Namespace) -> int:
    from mergestream.report.diff import compare

    found = compare(open_store(arguments), arguments.a, arguments.b)
    if arguments.json:
        print_json(found.to_json())
        return 0
    total = found.total
    print(f"A: {found.a}, ‖A − base‖ {total.norm_a:.6g}")
    print(f"B: {found.b}, ‖B − base‖ {total.norm_b:.6g}")
    print(f"‖A − B‖ {total.distance:.6g}   cosine of A − base and B − base {_cosine(total.cosine)}")
    print("\nlayers that moved most:")
    print_table(
        ("layer", "‖A − B‖", "share", "‖A − base‖", "‖B − base‖", "cosine"),
        (
            (
                layer,
                f"{one.distance:.4g}",
                f"{one.distance**2 / total.distance**2:.1%}" if total.distance else "-",
                f"{one.norm_a:.4g}",
                f"{one.norm_b:.4g}",
                _cosine(one.cosine),
            )
            for layer, one in list(found.layers.items())[:MOST]
        ),
    )
    if len(found.layers) > MOST:
        print(f"… and {len(found.layers) - MOST} more (--json lists all, and the tensors)")
    return 0


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
