"""Signals: SIGTERM ends work like Ctrl-C does, and neither interrupts a critical section."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM inside `terminated_like_interrupted`."""


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Make SIGTERM raise `Terminated`."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    with own_sigterm():
        if _is_main_thread():
            signal.signal(signal.SIGTERM, terminate)
        yield


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Restore the SIGTERM handler afterwards, in case a library replaces it."""
    if not _is_main_thread():
        yield
        return
    earlier = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier or signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the context ends."""
    if not _is_main_thread():  # signals interrupt only the main thread
        yield
        return
    delayed: list[int] = []

    def delay(number: int, frame: FrameType | None) -> None:
        delayed.append(number)

    earlier = {number: signal.signal(number, delay) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for arrived in delayed:
            signal.raise_signal(arrived)


def _is_main_thread() -> bool:
    """Check whether this thread may set signal handlers."""
    return threading.current_thread() is threading.main_thread()
