"""Escape untrusted text (names, paths, file contents) for terminals, Markdown and shells."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from mergestream.errors import UsageError

MAX_SENTENCE = 1000
"""Longest sentence of ours in characters, including the names in it"""


def one_line(text: str, limit: int = 300) -> str:
    """Make text safe for a terminal: one line, no control characters, shortened in the middle if too long.

    Characters that cannot be printed (controls, escapes, line ends, direction marks, unpaired surrogates) are written
    as Python escapes.
    """
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    if len(printable) <= limit:
        return printable
    end = (limit - 1) // 3  # the end of a path or a sentence matters as much as its beginning
    return f"{printable[: limit - 1 - end]}…{printable[len(printable) - end :]}"


def is_utf8(name: str) -> bool:
    """Whether a name can be encoded as UTF-8; unpaired surrogates cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def check_utf8(name: str) -> None:
    """Refuse a name that is not valid UTF-8, because names are written to JSON and model cards."""
    if not is_utf8(name):
        raise UsageError(f"{name!r} is not valid UTF-8; rename the file")


_MARKS = re.compile(r"[\\`*\[\]<>&|~#$]|(?<![^\W_])_|_(?![^\W_])|^(?:\d+[.)]|[-+])(?=\s|$)|:(?=//)|(?<=www)\.")
"""Markdown syntax: marks anywhere, an underscore outside a word, list markers, what turns an address into a link"""


def markdown_text(text: str, limit: int = 300) -> str:
    """Escape text for a line of Markdown, a list item or a table cell, by numeric character references."""
    return _MARKS.sub(lambda found: f"{found[0][:-1]}&#{ord(found[0][-1])};", one_line(text, limit))


def code(text: str) -> str:
    """Format as a Markdown code span, or escape it if it contains a backtick or a pipe."""
    line = one_line(text)
    return f"`{line}`" if line.strip() and not {"`", "|"} & set(line) else markdown_text(text)


def shell_command(words: Iterable[str]) -> str:
    """Quote words into one line that can be pasted into a shell."""
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_octal, word))}'" for word in words)


def _octal(character: str) -> str:
    if character.isprintable() and character not in "'\\":
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogatepass"))


def markdown_table(headings: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = (" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in (headings, *rows))
    first, *others = (f"| {line} |" for line in lines)
    return [first, "|" + "---|" * len(headings), *others]
