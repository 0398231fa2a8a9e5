from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergestream.text import one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("λ of expert-1 | ok", "λ of expert-1 | ok"),
        ("two\nlines\r\n", r"two\nlines\r\n"),
        ("\x1b[31mred\x1b[0m \x9b5m", r"\x1b[31mred\x1b[0m \x9b5m"),
        ("txt.\u202eexe", r"txt.\u202eexe"),
        ("half \ud800, \u2028 line, \U000e0041 tag", r"half \ud800, \u2028 line, \U000e0041 tag"),
    ],
)
def test_nothing_is_left_that_a_terminal_obeys(text: str, shown: str) -> None:
    assert one_line(text) == shown


def test_long_text_keeps_its_beginning_and_its_end() -> None:
    shown = one_line("/a/very" + "/long" * 1000 + "/path; do this", 60)
    assert len(shown) == 60 and shown.startswith("/a/very/long/") and "…" in shown and shown.endswith("path; do this")


@given(st.text(st.characters(exclude_categories=())), st.integers(10, 40))
def test_any_text_is_one_printable_line_within_the_limit(text: str, limit: int) -> None:
    shown = one_line(text, limit)
    assert shown.isprintable() and len(shown) <= limit
