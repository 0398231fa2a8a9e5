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

    if threading.current_thread() is not threading.main_thread():  # others may set no handlers
        yield
        return
    earlier = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier or signal.SIG_DFL)


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep what SIGTERM does here, whatever a library makes of it meanwhile."""
    if threading.current_thread() is not threading.main_thread():
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
    if threading.current_thread() is not threading.main_thread():  # no other is ever interrupted
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
