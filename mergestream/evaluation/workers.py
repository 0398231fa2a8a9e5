"""Parallel worker processes of one thread each, and the progress display of a benchmark."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from mergestream.escaping import one_line

QUIET_SECONDS = 60
"""Seconds between two lines of progress"""


def available_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_worker() -> None:
    """Set up a worker: one thread, so that results do not depend on the number of workers."""
    import torch

    torch.set_num_threads(1)
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent is killed; otherwise the next run would find this worker writing the same files."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def run_parallel(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], workers: int) -> Iterator[Any]:
    """Call ``function(*call)`` for every call and yield results as they are finished.

    A single worker runs in this process.
    """
    if not calls:
        return
    if workers == 1:
        _start_worker()
        yield from (function(*call) for call in calls)
        return
    context = multiprocessing.get_context("spawn")  # a forked torch may deadlock
    pool = ProcessPoolExecutor(min(workers, len(calls)), context, _start_worker)
    try:
        for future in as_completed([pool.submit(function, *call) for call in calls]):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def progress_lines() -> Callable[[str, int, int], None]:
    """Return a function that shows progress: a line per finished part, or after a while."""
    printed = time.monotonic()

    def print_line(what: str, done: int, total: int) -> None:
        nonlocal printed
        if done == total or time.monotonic() - printed >= QUIET_SECONDS:
            print(f"{one_line(what)}: {done} of {total}", file=sys.stderr, flush=True)
            printed = time.monotonic()

    return print_line
