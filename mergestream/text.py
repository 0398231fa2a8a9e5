"""Text that others have written (names, paths, what a file says), made fit for where it is shown."""

from __future__ import annotations

from mergestream.errors import UsageError

CUT = "…"
SENTENCE = 1000
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


def check_utf8(name: str) -> None:
    """Names end up in JSON and in model cards, which are text."""
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise UsageError(f"{name!r} is not valid UTF-8; rename the file")


def _spelled(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
