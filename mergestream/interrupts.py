"""Ctrl-C and SIGTERM: both end the work at hand as a KeyboardInterrupt, but not where it must not be cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is to be taken like Ctrl-C."""


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Have SIGTERM raise `Terminated`."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    with own_sigterm():
        if _may_set_handlers():
            signal.signal(signal.SIGTERM, terminate)
        yield


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep what SIGTERM does here, whatever is made of it meanwhile, by a library too."""
    if not _may_set_handlers():
        yield
        return
    earlier = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier or signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until this is done."""
    if not _may_set_handlers():  # and is never interrupted
        yield
        return
    waiting: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append(number)

    earlier = {number: signal.signal(number, wait) for number in signals}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for arrived in waiting:
            signal.raise_signal(arrived)


def _may_set_handlers() -> bool:
    """Which only the main thread may."""
    return threading.current_thread() is threading.main_thread()
