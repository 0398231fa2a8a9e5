"""Progress of a benchmark, for whoever waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mergestream.escaping import one_line

QUIET_SECONDS = 60  # in a log, a long run says at least this often that it lives


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Bars with the time left on a terminal; elsewhere a line whenever something is finished, and one a minute."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        finished: set[str] = set()
        last_shown = time.monotonic()

        def tell(what: str, done: int, total: int) -> None:
            nonlocal last_shown
            if done == total and what not in finished:
                finished.add(what)
                print(f"{one_line(what)}: done", file=sys.stderr, flush=True)
            elif done < total and time.monotonic() - last_shown >= QUIET_SECONDS:
                print(f"{one_line(what)}: {done} of {total}", file=sys.stderr, flush=True)
            else:
                return
            last_shown = time.monotonic()

        yield tell
        return
    columns = (
        *(progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), progress.MofNCompleteColumn()),
        *(progress.TimeElapsedColumn(), progress.TextColumn("left")),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
    )
    with progress.Progress(*columns, console=console) as bars:
        known = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(one_line(what), total=total)
            bars.update(known[what], completed=done, total=total)

        yield show
