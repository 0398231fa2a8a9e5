"""Progress bars for long work, and notes: sentences that the user should read but that are no errors."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from mergestream.errors import MergestreamWarning, in_python
from mergestream.escaping import MAX_SENTENCE, one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars

Advance = Callable[[int], None]
"""Called with the number of bytes that were processed since the last call"""
REFRESH_SECONDS = 0.1


class Progress:
    """Base class: shows no bars, and turns notes into Python warnings."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        """Show a bar for ``total`` bytes of work while the context is open."""
        yield lambda amount: None

    def note(self, message: str) -> None:
        """Show one sentence to the user."""
        named = in_python(message)
        warnings.warn(f"{message} ({named})" if named else message, MergestreamWarning, stacklevel=2)


class NoProgress(Progress):
    """Shows neither bars nor notes."""

    def note(self, message: str) -> None:
        pass


class NotebookProgress(Progress):
    """Shows bars below the running notebook cell; notes are Python warnings."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        from IPython.display import display

        bars, drawn = _make_bars(), time.monotonic()
        task = bars.add_task(one_line(description), total=total)
        handle = display(bars, display_id=True)  # type: ignore[no-untyped-call, unused-ignore]

        def advance(amount: int) -> None:
            nonlocal drawn
            bars.advance(task, amount)
            if time.monotonic() >= drawn + REFRESH_SECONDS:
                handle.update(bars)
                drawn = time.monotonic()

        try:
            yield advance
        finally:
            handle.update({"text/html": "", "text/plain": ""}, raw=True)


class TerminalProgress(Progress):
    """Shows bars and notes on standard error; bars only if that is a terminal."""

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return Console(stderr=True)

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        if not sys.stderr.isatty():  # rich takes a while to import
            yield lambda amount: None
            return
        with _make_bars(self._console) as bars:
            task = bars.add_task(one_line(description), total=total)
            yield lambda amount: bars.advance(task, amount)

    def note(self, message: str) -> None:
        line = f"note: {one_line(message, MAX_SENTENCE)}"
        self._console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)


def default_progress() -> Progress:
    """Choose the display for callers that pass none: bars in a notebook, nothing elsewhere."""
    ipython = sys.modules.get("IPython")
    in_notebook = ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
    return NotebookProgress() if in_notebook else Progress()


def _make_bars(console: Console | None = None) -> Bars:
    from rich import progress

    description = progress.TextColumn("{task.description}", markup=False)
    amounts = progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn()
    return progress.Progress(description, progress.BarColumn(), *amounts, console=console, transient=True)
