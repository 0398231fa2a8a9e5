"""``mergestream report`` and ``mergestream diff``: write a report on a store, or compare its steps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.cli.options import WorkingStoreOptions, argument
from mergestream.cli.printing import answer, is_json, print_table, print_text, say
from mergestream.errors import UsageError

if TYPE_CHECKING:
    from mergestream.report.facts import Facts


FORMATS = {".html": "html", ".htm": "html", ".md": "md", ".json": "json"}
"""By the extension of the file"""
MOST_LAYERS = 20


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


@dataclass(frozen=True)
class Diff(WorkingStoreOptions):
    EXAMPLES = """
        mergestream diff store 3 4
        mergestream diff store 0 4
        mergestream diff store 4 path/to/expert
        """
    a: str = argument("A", "a step number (0 is the base), or a checkpoint")
    b: str = argument("B", "the same, for the second model")

    def run(self) -> None:
        from mergestream.report.diff import compare

        found = compare(self.open_store(), self.a, self.b)
        answer(asdict(found))
        total = found.total
        say(f"A: {found.a}, ‖A − base‖ {total.norm_a:.6g}")
        say(f"B: {found.b}, ‖B − base‖ {total.norm_b:.6g}")
        say(f"‖A − B‖ {total.distance:.6g}   cosine of A − base and B − base {_cosine_text(total.cosine)}")
        say()
        say("layers with the largest differences:")
        print_table(
            ("layer", "‖A − B‖", "share", "‖A − base‖", "‖B − base‖", "cosine"),
            (
                (
                    *(layer, f"{one.distance:.4g}"),
                    f"{one.distance**2 / total.distance**2:.1%}" if total.distance else "-",
                    *(f"{one.norm_a:.4g}", f"{one.norm_b:.4g}", _cosine_text(one.cosine)),
                )
                for layer, one in found.layers.items()
            ),
            most=MOST_LAYERS,
        )


def _cosine_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
