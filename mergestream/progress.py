"""Progress of long work: bars on a terminal, and notes: what the user should know, and what is no error."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

from mergestream.errors import MergestreamWarning
from mergestream.escaping import MAX_SENTENCE, one_line

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[[int], None]
_REDRAWN = 0.1
"""Seconds between two looks of a bar in a notebook"""


class Progress:
    """Shows no bars; a note is a Python warning. ``task`` gives a function that is told how many bytes are done."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        yield lambda amount: None

    def note(self, message: str) -> None:
        warnings.warn(message, MergestreamWarning, stacklevel=2)


class NotebookProgress(Progress):
    """Bars below the cell that is running, as long as the work takes; a note is a Python warning."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        from IPython.display import display

        label, done, shown_at = one_line(description), 0, time.monotonic()

        def shown() -> dict[str, str]:
            bar = f'<progress value="{done}" max="{max(total, 1)}"></progress> {escape(label)}'
            return {"text/html": bar, "text/plain": f"{label}: {done / max(total, 1):.0%}"}

        def advance(amount: int) -> None:
            nonlocal done, shown_at
            done += amount
            if time.monotonic() >= shown_at + _REDRAWN:
                handle.update(shown(), raw=True)
                shown_at = time.monotonic()

        handle = display(shown(), raw=True, display_id=True)
        try:
            yield advance
        finally:
            handle.update({"text/html": "", "text/plain": ""}, raw=True)


def default_progress() -> Progress:
    """That of who asks for none: bars in a notebook."""
    return NotebookProgress() if _is_notebook() else Progress()


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return getattr(ipython.get_ipython(), "kernel", None) is not None if ipython else False


class NoProgress(Progress):
    """Shows nothing at all."""

    def note(self, message: str) -> None:
        pass


class TerminalProgress(Progress):
    """Bars (rich) on standard error, and notes; without bars where nobody watches."""

    def __init__(self, bars: bool = True) -> None:
        self._bars = bars

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return Console(stderr=True)

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        if not (self._bars and self._console.is_terminal):
            yield lambda amount: None
            return
        from rich import progress

        columns = (
            *(progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), progress.DownloadColumn()),
            *(progress.TransferSpeedColumn(), progress.TimeRemainingColumn()),
        )
        with progress.Progress(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task(one_line(description), total=total)
            yield lambda amount: bars.advance(task, amount)

    def note(self, message: str) -> None:
        line = f"note: {one_line(message, MAX_SENTENCE)}"
        self._console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)
