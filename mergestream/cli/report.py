"""``mergestream report``: write a report on a store as HTML, Markdown or JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.cli.options import WorkingStoreOptions, argument
from mergestream.cli.printing import answer, is_json, print_text, say
from mergestream.errors import UsageError

if TYPE_CHECKING:
    from mergestream.report.facts import Facts


FORMATS = {".html": "html", ".htm": "html", ".md": "md", ".json": "json"}
"""By the extension of the file"""


@dataclass(frozen=True)
class Report(WorkingStoreOptions):
    EXAMPLES = """
        mergestream report store
        mergestream report store -o report.md
        mergestream report store --format json
        """
    out: str | None = argument("-o --out FILE", "the output file (STORE-report.html; md and json: standard output)")
    format: str | None = argument(
        "--format", "the format (by the extension of FILE; html)", choices=("html", "md", "json")
    )

    def run(self) -> None:
        from mergestream.export.places import refuse_file
        from mergestream.files import write_text
        from mergestream.report.facts import Facts

        out = Path(self.out) if self.out else None
        default = "json" if is_json() and not out else "html"
        form = self.format or (FORMATS.get(out.suffix.lower()) if out else default)
        if form is None:
            raise UsageError(f"-o {out} is not a .html, .md or .json file; rename it, or pass --format")
        store = self.open_store()
        if form == "html":
            out = out or _default_file(self.store)
        if out is not None:
            refuse_file(out, *store.sources)
        facts = Facts.of(store)
        text = _render(facts, form)
        if out is not None:
            write_text(out, text)
            answer({"store": str(store.storage), "out": str(out), "format": form})
            say(f"{out}: report on {self.store}")
        else:
            answer(facts.to_json() if form == "json" else {"format": form, "text": text})
            print_text(text, end="")


def _default_file(store: str) -> Path:
    """``STORE-report.html`` beside the store; in the working directory if the store is in a bucket."""
    if "://" in store:
        return Path(f"{store.rstrip('/').rpartition('/')[2]}-report.html")
    path = Path(store) if Path(store).name.strip(".") else Path(store).resolve()
    return path.with_name(f"{path.name}-report.html")


def _render(facts: Facts, form: str) -> str:
    if form == "json":  # one line per key, because the matrices of hundreds of experts are long
        lines = (f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in facts.to_json().items())
        return "{\n" + ",\n".join(lines) + "\n}\n"
    from mergestream.report.render import render_html, render_markdown

    return render_html(facts) if form == "html" else render_markdown(facts)
