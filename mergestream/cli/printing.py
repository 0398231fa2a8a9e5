"""Output of commands: text for people, or JSON with ``--json``.

A command prints text with `say`, `print_table` and `print_text`, and passes the same content as data to `answer`. With
``--json`` the text is suppressed, and the data, the notes and any error are printed as one JSON value at the end.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mergestream import errors
from mergestream.errors import MergestreamError
from mergestream.escaping import MAX_SENTENCE, one_line
from mergestream.progress import NoProgress, Progress, TerminalProgress

LONGEST_CELL = 100


@dataclass
class JsonReply:
    """The state of a command's JSON output."""

    data: Any = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_stream: bool = False
    """Whether events are printed as they happen, one object per line, instead of one value at the end"""
    is_finished: bool = False


_reply: JsonReply | None = None
"""The reply of the running command, or None for text"""


@contextmanager
def replying(as_json: bool) -> Iterator[None]:
    """Print JSON or text while the context is open."""
    global _reply
    _reply = JsonReply() if as_json else None
    errors.is_command_line = True
    try:
        yield
    finally:
        _reply, errors.is_command_line = None, False


def is_json() -> bool:
    """Whether the command prints JSON."""
    return _reply is not None


def answer(data: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Set the command's result for ``--json``. The command may change it until it ends."""
    if _reply:
        _reply.data = data


def emit(event: Mapping[str, Any]) -> None:
    """Print one event of a long-running command as a line of JSON, at once, and after the first one earlier notes."""
    if _reply:
        _reply.is_stream = True
        _print_json(event, indent=None)
        earlier, _reply.notes = _reply.notes, []
        for note in earlier:
            emit({"event": "note", "note": note})


def with_notes(data: dict[str, Any]) -> dict[str, Any]:
    """Add the notes since the last call to an object of the answer."""
    if not _reply:
        return data
    notes, _reply.notes = _reply.notes, []
    return {**data, "notes": list(dict.fromkeys((*data.get("notes", ()), *notes)))}


def finish(*reasons: str, kind: str = "") -> None:
    """End the output of a command, once. If the answer is a list, ``reasons`` for a failure become its last item."""
    if _reply and not _reply.is_finished:
        _reply.is_finished = True
        failure = {"error": "; ".join(reasons), "kind": kind, "reasons": reasons} if reasons else {}
        if _reply.is_stream:
            if failure:
                emit({"event": "error", **failure})
        elif isinstance(_reply.data, list):
            _print_json([*_reply.data, with_notes(failure)] if failure else _reply.data)
        else:
            _print_json(with_notes({**_reply.data, **failure}))
    sys.stdout.flush()


def make_progress(quiet: bool = False) -> Progress:
    """Create the progress display of a command. ``--json`` contains the notes even if ``quiet``."""
    return (_QuietProgress if quiet else _CommandProgress)()


class _QuietProgress(NoProgress):
    """Shows nothing, and adds the notes to the JSON output."""

    def note(self, message: str) -> None:
        sentence = one_line(message, MAX_SENTENCE)
        if _reply and _reply.is_stream:
            emit({"event": "note", "note": sentence})
        elif _reply:
            _reply.notes.append(sentence)


class _CommandProgress(TerminalProgress):
    """Shows bars and notes, and adds the notes to the JSON output."""

    def note(self, message: str) -> None:
        super().note(message)
        _QuietProgress().note(message)


def say(line: str = "") -> None:
    """Print one line of text at once, with control characters escaped."""
    if not _reply:
        print(one_line(line, MAX_SENTENCE), flush=True)


def print_text(text: str, end: str = "\n") -> None:
    """Print text of several lines as it is."""
    if not _reply:
        print(text, end=end)


def print_error(*sentences: str) -> None:
    """Print errors to standard error, one line each."""
    for sentence in sentences:
        print(f"error: {one_line(sentence, MAX_SENTENCE)}", file=sys.stderr, flush=True)


def error_sentences(error: Exception) -> Sequence[str]:
    """Describe an error, with its type if it is unexpected."""
    if isinstance(error, MergestreamError):
        return error.sentences
    if isinstance(error, OSError) and error.strerror:
        return [f"{error.filename} cannot be used: {error.strerror}" if error.filename else error.strerror]
    return [f"{type(error).__name__}: {error}"]


def error_kind(error: Exception) -> str:
    """The kind of an error; ``system`` for one of the operating system, and ``internal`` if it is unexpected."""
    return getattr(error, "kind", "system" if isinstance(error, OSError) else "internal")


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[Any]], *, left: int = 1, most: int | None = None
) -> None:
    """Print a table: the first ``left`` columns aligned left, at most ``most`` rows."""
    if _reply:
        return
    listed = list(rows)
    table = [[one_line(str(cell), LONGEST_CELL) for cell in row] for row in (headings, *listed[:most])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[:left] = [cell.ljust(width) for cell, width in zip(row[:left], widths, strict=False)]
        print("  ".join(cells).rstrip())
    if most is not None and len(listed) > most:
        print(f"… and {len(listed) - most} more (--json lists all)")


def counts_text(counts: Mapping[Any, int], matrices: int = 0) -> str:
    """Format counts, the largest first: ``6 linear, 4 other``; with stacks of matrices ``6 linear (20 matrices)``."""
    texts = {what: f"{count} {what}" for what, count in sorted(counts.items(), key=lambda item: -item[1])}
    if matrices > counts.get("linear", 0):
        texts["linear"] += f" ({matrices} matrices)"
    return ", ".join(texts.values())


def _print_json(data: Any, indent: int | None = 2) -> None:
    """Print JSON in ASCII, because a terminal would interpret some other characters."""
    print(json.dumps(_replace_infinite(data), indent=indent, allow_nan=False), flush=True)


def _replace_infinite(data: Any) -> Any:
    """Replace infinity and NaN by null, which JSON lacks: λ is infinite for a scale of 0."""
    if isinstance(data, dict):
        return {key: _replace_infinite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_replace_infinite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
