"""What commands print: lines and tables for people, or JSON; errors; counts.

A command says what it has to say with `say` and `print_table`, and gives the same as data to `answer`. Which of the two
is printed is for ``--json`` to decide: of JSON there is one value when the command is done, with the notes in it, and
with the error where it failed.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mergestream.escaping import MAX_SENTENCE, one_line
from mergestream.progress import Advance, NoProgress, Progress, TerminalProgress

LONGEST_CELL = 100
_BOLD, _CYAN, _PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[0m"


class Reply:
    """What goes to who asked for JSON."""

    def __init__(self) -> None:
        self.data: Any = {}
        self.notes: list[str] = []
        self.followed = False
        """Whether events are printed as they happen, an object a line, instead of one value at the end"""
        self.finished = False

    def note(self, sentence: str) -> None:
        if self.followed:
            _print_line({"event": "note", "note": sentence})
        else:
            self.notes.append(sentence)

    def finish(self, reasons: Sequence[str]) -> None:
        """Print it, once; ``reasons`` are why the command failed. What is a list stays one: a failure is its last item,
        and the notes are with the items that they are about."""
        if self.finished:
            return
        self.finished = True
        failure = {"error": "; ".join(reasons), "reasons": reasons} if reasons else {}
        if self.followed:
            if failure:
                _print_line({"event": "error", **failure})
        elif isinstance(self.data, list):
            _print_whole([*self.data, self.with_notes(failure)] if failure else self.data)
        else:
            _print_whole(self.with_notes({**self.data, **failure}))

    def with_notes(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Add the notes since the last time to those that it has."""
        notes, self.notes = self.notes, []
        return {**data, "notes": list(dict.fromkeys((*data.get("notes", ()), *notes)))}


_reply: Reply | None = None
"""Of the command that is running, where it is to answer in JSON"""


@contextmanager
def replying(as_json: bool) -> Iterator[None]:
    """Whatever is said within is said in JSON, or in words."""
    global _reply
    _reply = Reply() if as_json else None
    try:
        yield
    finally:
        _reply = None


def is_json() -> bool:
    """Whether the command is to answer in JSON."""
    return _reply is not None


def answer(data: Any) -> None:
    """What the command has found or done, as JSON: an object, or a list which may still grow."""
    if _reply:
        _reply.data = data


def add_to_answer(more: Mapping[str, Any]) -> None:
    """The same of what is known later."""
    if _reply:
        _reply.data = {**_reply.data, **more}


def emit(event: Mapping[str, Any]) -> None:
    """An event of a command that goes on, as a line of JSON, at once, for somebody follows."""
    if _reply:
        _reply.followed = True
        _print_line(event)
        earlier, _reply.notes = _reply.notes, []
        for note in earlier:
            _reply.note(note)


def finish(*reasons: str) -> None:
    """The command is done, or has failed for these reasons."""
    if _reply:
        _reply.finish(reasons)
    sys.stdout.flush()


def with_notes(item: dict[str, Any]) -> dict[str, Any]:
    """An item of a list that is the answer, with the notes that were given on it."""
    return _reply.with_notes(item) if _reply else item


def make_progress(quiet: bool = False) -> Progress:
    """Bars and notes for who watches; the notes also for who asked for JSON, who gets them in any case."""
    shown = NoProgress() if quiet else TerminalProgress()
    return _Noted(shown, _reply) if _reply else shown


class _Noted(Progress):
    """What another shows, and its notes in the reply."""

    def __init__(self, shown: Progress, reply: Reply) -> None:
        self._shown, self._reply = shown, reply

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        with self._shown.task(description, total) as advance:
            yield advance

    def note(self, message: str) -> None:
        self._shown.note(message)
        self._reply.note(one_line(message, MAX_SENTENCE))


def say(line: str = "") -> None:
    """Print a line, whatever the names in it are; at once, for somebody may be waiting for it."""
    if not _reply:
        print(one_line(line, MAX_SENTENCE), flush=True)


def print_text(text: str, end: str = "\n") -> None:
    """Print lines that are ready to be printed."""
    if not _reply:
        print(text, end=end)


def print_error(*sentences: str) -> None:
    for sentence in sentences:
        print(f"error: {one_line(sentence, MAX_SENTENCE)}", file=sys.stderr, flush=True)


def _print_whole(data: Any) -> None:
    """Names as they are; what is not ASCII is escaped, for a terminal obeys some of it."""
    print(json.dumps(_finite(data), indent=2, allow_nan=False))


def _print_line(data: Any) -> None:
    print(json.dumps(_finite(data), allow_nan=False), flush=True)


def _finite(data: Any) -> Any:
    """JSON has no infinity: the λ of a scale of 0 is null."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, left: int = 1) -> None:
    """Columns as wide as their content; the first ``left`` are text, the others numbers."""
    if _reply:
        return
    table = [[one_line(str(cell), LONGEST_CELL) for cell in row] for row in (headings, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(headings))]
    coloured = _is_coloured()
    for number, row in enumerate(table):
        first, *others = (
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        rest = "".join(f"  {cell}" for cell in others).rstrip()
        if not coloured:
            print((first + rest).rstrip())
        elif number == 0:
            print(f"{_BOLD}{first}{rest}{_PLAIN}")
        else:
            print(f"{_CYAN}{first}{_PLAIN}{rest}")


def _is_coloured() -> bool:
    """Only for who looks at it, and only where colours are welcome (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def counts_text(counts: Mapping[Any, int]) -> str:
    """``6 linear, 4 other``, the most frequent first."""
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items(), key=lambda item: -item[1]))
