"""How the report writes names, numbers and lists of findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mergestream.escaping import one_line

MAX_NAME = 32
"""Characters of a name, in tables, sentences and figures alike"""
MAX_FINDINGS = 5
"""Findings of one kind that are listed"""


def short_name(name: str) -> str:
    """A name on one line, shortened in the middle."""
    return one_line(name, MAX_NAME)


def short_names(names: Iterable[str]) -> list[str]:
    """Several names, shortened; names that become equal get a mark each, so that they stay apart."""
    found: dict[str, None] = {}
    for name in map(short_name, names):
        while name in found:
            name += "′"
        found[name] = None
    return list(found)


def format_number(value: float | None, form: str = ".3f") -> str:
    """A number with a real minus sign; a dash for an unknown value."""
    return "–" if value is None else format(value, form).replace("-", "−")


def format_range(values: Sequence[float], form: str) -> str:
    """``0.08 to 0.24``"""
    least, most = (format_number(value + 0.0, form) for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def shorten_findings(sentences: Iterable[str]) -> list[str]:
    """The first findings of one kind, and how many more there are."""
    found = list(sentences)
    more = len(found) - MAX_FINDINGS
    return found if more <= 0 else [*found[:MAX_FINDINGS], f"… and {more} more of these."]
