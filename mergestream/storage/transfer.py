"""Network transfers: errors of a service in our words, one retry helper, a small pool of threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from mergestream.errors import MergestreamError

Result = TypeVar("Result")

ATTEMPTS = 9
FIRST_PAUSE = 0.1
"""Seconds before the second attempt; every pause is twice the one before, half a minute in all"""
_THREADS = 8


class TransientError(OSError):
    """A failure that may be gone at the next attempt: a lost connection, a busy service."""


def service_error(what: str, status: int | None) -> Exception:
    """The error for an HTTP status, None for a lost connection. Never quotes the service: it may repeat a token."""
    match status:
        case None:
            return TransientError("no answer, or one that broke off")
        case 404:
            return MergestreamError(f"{what} does not exist")
        case 401 | 403:
            return MergestreamError(
                f"{what} may not be read or written with the credentials in the environment; check them"
            )
        case _ if status >= 500 or status in (408, 429):
            return TransientError(f"the service is not available (HTTP {status})")
    return MergestreamError(f"{what}: the service refuses this (HTTP {status})")


def retry(what: str, ask: Callable[[], Result], done: str = "read") -> Result:
    """Call ``ask`` until it raises no `TransientError`, with growing pauses; ``what`` names the file in the error."""
    pause = FIRST_PAUSE
    for _ in range(ATTEMPTS - 1):
        try:
            return ask()
        except TransientError:
            time.sleep(pause)
            pause *= 2
    try:
        return ask()
    except TransientError as error:
        raise give_up(what, done, error) from error


def give_up(what: str, done: str, error: TransientError) -> MergestreamError:
    """The error after the last attempt."""
    return MergestreamError(f"{what} cannot be {done}, after {ATTEMPTS} attempts: {error}; try again later")


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="mergestream-transfer")


def start(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Run a transfer on one of the pool's threads; a transfer must not wait for another one."""
    return _pool().submit(work, *arguments)


def wait_all(transfers: Iterable[Future[Any]]) -> None:
    """Wait for all transfers; the first failure cancels the others."""
    waiting = list(transfers)
    try:
        for transfer in waiting:
            transfer.result()
    except BaseException:
        for transfer in waiting:
            transfer.cancel()
        raise
