from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergestream.escaping import code, markdown_text, one_line, shell_command


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


@pytest.mark.parametrize("text", ["expert-1", "qwen_2.5-math_v1", "-0.5", "1.5 B (λ = 2)", "a, b: c/d", "50%"])
def test_ordinary_names_are_the_same_in_markdown(text: str) -> None:
    assert markdown_text(text) == text and code(text) == f"`{text}`"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<script>", "&#60;script&#62;"),
        ("a|b`c`", "a&#124;b&#96;c&#96;"),
        ("\\|", "&#92;&#124;"),
        ("[x](http://y)", "&#91;x&#93;(http&#58;//y)"),
        ("_all_ *of* ~it~", "&#95;all&#95; &#42;of&#42; &#126;it&#126;"),
        ("&lt;", "&#38;lt;"),
        ("# title", "&#35; title"),
        ("- item", "&#45; item"),
        ("1. item", "1&#46; item"),
        ("two\n\n# lines", "two&#92;n&#92;n&#35; lines"),
        ("$x$ www.y", "&#36;x&#36; www&#46;y"),
    ],
)
def test_marks_are_shown_in_markdown_and_not_obeyed(text: str, shown: str) -> None:
    assert markdown_text(text) == shown


def test_a_code_span_is_closed_by_nothing_in_it() -> None:
    assert code("a`<b>|") == markdown_text("a`<b>|") and code("") == "" and code("<b>\n") == r"`<b>\n`"


@pytest.mark.parametrize("words", [["mergestream", "a b", "it's"], ["a\nb'\\x", "\x1b[31m", "é\x9b", "\u202e$(date)"]])
def test_a_command_is_one_line_that_a_shell_reads_back(words: list[str]) -> None:
    line = shell_command(words)
    assert line.isprintable()
    run = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    assert run.stdout.decode().split("\0")[:-1] == words
