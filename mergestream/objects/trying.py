"""What is asked of a network is tried again where it breaks, and asked a few times at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from mergestream.errors import MergestreamError

Result = TypeVar("Result")

_AT_ONCE = 8
"""Requests under way in this process"""
TRIES = 9
_FIRST_PAUSE = 0.1
"""Seconds; each pause is twice the one before, so that a service has half a minute to come back"""


class PassingError(OSError):
    """Something that may be better next time: a connection that broke off, a service that is busy. Tells what."""


def fault(what: str, status: int | None) -> Exception:
    """What an answer means by which nothing was got, by its number in HTTP; None where there was no answer."""
    match status:
        case None:
            return PassingError("no answer, or one that broke off")
        case 404:
            return MergestreamError(f"{what} does not exist")
        case 401 | 403:
            return MergestreamError(
                f"{what} may not be read or written with the credentials in the environment; check them"
            )
        case _ if status >= 500 or status in (408, 429):
            return PassingError(f"the service is not able to (HTTP {status})")
    return MergestreamError(f"{what}: the service refuses this (HTTP {status})")


def tried(what: str, ask: Callable[[], Result], done: str = "read") -> Result:
    """What comes of it at the first time that nothing breaks."""
    pause = _FIRST_PAUSE
    for _ in range(TRIES - 1):
        try:
            return ask()
        except PassingError:
            time.sleep(pause)
            pause *= 2
    try:
        return ask()
    except PassingError as error:
        raise given_up(what, done, error) from error


def given_up(what: str, done: str, error: PassingError) -> MergestreamError:
    return MergestreamError(f"{what} cannot be {done}, after {TRIES} attempts: {error}; try again later")


@cache
def _fetchers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="mergestream-fetch")


def in_background(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Have it done by one of the few threads that wait for the network, which must not wait for each other."""
    return _fetchers().submit(work, *arguments)


def wait_for(works: Iterable[Future[Any]]) -> None:
    """Until all are done; at the first that fails the others are called off."""
    waiting = list(works)
    try:
        for work in waiting:
            work.result()
    except BaseException:
        for work in waiting:
            work.cancel()
        raise
