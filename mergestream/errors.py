"""Errors that a user can act on: one sentence each, printed as ``error: …`` by the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

_STAND_INS: dict[str, str] = {}


def known_as(directory: Path, address: str) -> None:
    """Have errors tell the address of what a directory of this process only stands in for."""
    _STAND_INS[str(directory)] = address


class MergestreamError(Exception):
    """The input or the store is at fault; the message says what, where, and what to do."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str = "") -> None:
        for directory, address in _STAND_INS.items():
            message = message.replace(directory, address)
        super().__init__(message)

    @property
    def sentences(self) -> Sequence[str]:
        """What is printed, each on a line of its own."""
        return (str(self),)


class UsageError(MergestreamError):
    """The call itself is wrong: an unknown method, a parameter out of range."""

    exit_code: ClassVar[int] = 2


class StoreBusyError(MergestreamError):
    """Another process is writing to the store, or to the same output."""

    exit_code: ClassVar[int] = 3


class EngineError(MergestreamError):
    """Who runs the work is not there, or is lost: nothing is at fault with the models, and what is done stays done."""


class DamagedError(MergestreamError):
    """The store or its base is not what it was, whatever is to be done with it."""


class MergestreamWarning(UserWarning):
    """Something that a user should know, and that is no error: a note, where Python has no display for it."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean …?`` where a known word is close to one that is not known, else nothing."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def first_line(error: BaseException) -> str:
    """What another library says of it, as far as that fits into a sentence; what it is where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
