"""Signals: SIGTERM ends work like Ctrl-C does, and neither interrupts a critical section."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM inside `terminated_like_interrupted`."""


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Make SIGTERM raise `Terminated`."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    with _handled_by(terminate, signal.SIGTERM):
        yield


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Restore the SIGTERM handler afterwards, in case a library replaces it."""
    with _handled_by(signal.getsignal(signal.SIGTERM), signal.SIGTERM):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the context ends."""
    delayed: list[int] = []
    try:
        with _handled_by(lambda number, frame: delayed.append(number), signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        for arrived in delayed:
            signal.raise_signal(arrived)


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], Any] | int | None, *numbers: int) -> Iterator[None]:
    """Handle signals while the context is open; only the main thread may do so, and only it is interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, handler or signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        for number, before in earlier.items():
            signal.signal(number, before or signal.SIG_DFL)
