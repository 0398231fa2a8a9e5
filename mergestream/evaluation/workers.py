"""Independent work in processes of one thread each: experts are trained, streams are run, side by side."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from typing import Any


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_listeners: list[Callable[[tuple[Any, ...]], None]] = []


def _start_worker(send: Callable[[tuple[Any, ...]], None]) -> None:
    """One thread a process: the same result whatever else runs, and no contention for the cores."""
    import torch

    torch.set_num_threads(1)
    _listeners[:] = [send]
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed must not go on: the next run would find it at work on the same files."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def report(*event: Any) -> None:
    """Send an event from a worker to whoever called ``run_parallel``."""
    for send in _listeners:
        send(event)


def run_parallel(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    workers: int,
    on_event: Callable[..., None] = lambda *_: None,
) -> Iterator[Any]:
    """``function(*call)`` for every call, results as they come; events sent by ``report`` reach ``on_event``.

    A single worker is this process.
    """
    if not calls:
        return
    if workers == 1:
        _start_worker(lambda event: on_event(*event))
        yield from (function(*call) for call in calls)
        return
    context = multiprocessing.get_context("spawn")  # a forked torch may deadlock
    events = context.SimpleQueue()
    pool = ProcessPoolExecutor(min(workers, len(calls)), context, _start_worker, (events.put,))
    try:
        waiting = [pool.submit(function, *call) for call in calls]
        while waiting:
            wait(waiting, timeout=0.25, return_when=FIRST_COMPLETED)
            while not events.empty():
                on_event(*events.get())
            for future in [future for future in waiting if future.done()]:
                waiting.remove(future)
                yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
