"""The report command."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.cli.options import ComputingOptions, WorkingStoreOptions, argument
from mergestream.cli.printing import answer, is_json, print_text, say
from mergestream.errors import UsageError

if TYPE_CHECKING:
    from mergestream.api import Store
    from mergestream.report.facts import Facts

HELP = "write a page with the figures and facts of a store"
EXAMPLES = """
mergestream report store -o report.html
mergestream report store --format md
mergestream report store -o report.json
"""

FORMATS = {".html": "html", ".htm": "html", ".md": "md", ".json": "json"}
"""By a file's ending."""


@dataclass(frozen=True)
class Options(WorkingStoreOptions, ComputingOptions):
    out: str | None = argument("-o", "--out", metavar="FILE", help="where to (md and json: standard output)")
    format: str | None = argument(
        "--format", choices=("html", "md", "json"), help="what to write (by FILE's ending, or html)"
    )


def run(options: Options) -> int:
    out = Path(options.out) if options.out else None
    usual = "json" if is_json() and not out else "html"
    form = options.format or (FORMATS.get(out.suffix.lower(), usual) if out else usual)
    if form == "html" and out is None:
        raise UsageError("say where the page is to be written: -o report.html")
    store = options.open_store()
    if out is None:
        _print(_facts(store), form)
        return 0
    from mergestream.export.places import refuse_file
    from mergestream.files import write_text

    refuse_file(out, *store.sources)
    write_text(out, _render(_facts(store), form))
    answer({"store": str(store.place), "out": str(out), "format": form})
    say(f"{out}: the report of {options.store}")
    return 0


def _facts(store: Store) -> Facts:
    from mergestream.report.facts import Facts

    return Facts.of(store)


def _print(facts: Facts, form: str) -> None:
    text = _render(facts, form)
    answer(facts.to_json() if form == "json" else {"format": form, "text": text})
    print_text(text, end="")


def _render(facts: Facts, form: str) -> str:
    if form == "html":
        from mergestream.report.page import page

        return page(facts)
    if form == "md":
        from mergestream.report.markdown import markdown

        return markdown(facts)
    return _json(facts.to_json())


def _json(data: dict[str, Any]) -> str:
    """A line for each fact: hundreds of experts have matrices that nobody reads number by number."""
    lines = (f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in data.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"
