"""Text that others have written (names, paths, what a file says), made fit for where it is shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from mergestream.errors import UsageError

CUT = "…"
MAX_SENTENCE = 1000
"""Characters at most of a sentence of ours, with all the names in it"""


def one_line(text: str, limit: int = 300) -> str:
    """For a terminal: on one line, with nothing that it would obey, and cut in the middle where it is too long.

    What cannot be printed (controls and escapes, line ends, marks that turn the direction of writing, halves of
    characters) is spelled as Python would, so that it can be told.
    """
    shown = text if text.isprintable() else "".join(map(_spelled, text))
    if len(shown) <= limit:
        return shown
    end = (limit - len(CUT)) // 3  # of a path and of a sentence, the end tells as much as the beginning
    return shown[: limit - len(CUT) - end] + CUT + shown[len(shown) - end :]


def is_utf8(name: str) -> bool:
    """Whether a name can be written as UTF-8: half a surrogate pair stands for bytes that cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def check_utf8(name: str) -> None:
    """Names end up in JSON and in model cards, which are text."""
    if not is_utf8(name):
        raise UsageError(f"{name!r} is not valid UTF-8; rename the file")


def _spelled(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


_MARKS = re.compile(r"[\\`*\[\]<>&|~#$]|(?<![^\W_])_|_(?![^\W_])|^(?:\d+[.)]|[-+])(?=\s|$)|:(?=//)|(?<=www)\.")
"""What means something in Markdown: marks anywhere, an underscore that is not within a word, what begins a list, what
makes a link of an address"""


def markdown_text(text: str, limit: int = 300) -> str:
    """For a line of Markdown, an item of a list or a cell of a table: marks are referred to by their numbers, which
    are shown, and obeyed nowhere."""
    return _MARKS.sub(lambda found: f"{found[0][:-1]}&#{ord(found[0][-1])};", one_line(text, limit))


def code(text: str) -> str:
    """The same as a code span, where its marks allow one."""
    line = one_line(text)
    return f"`{line}`" if line.strip() and not {"`", "|"} & set(line) else markdown_text(text)


def shell_command(words: Iterable[str]) -> str:
    """A command line of these words, to be copied to a shell: on one line, whatever the words are."""
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_octal, word))}'" for word in words)


def _octal(character: str) -> str:
    if character.isprintable() and character not in "'\\":
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogatepass"))
