"""Errors that a user can act on: one sentence each, printed as ``error: …`` by the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

_ADDRESSES: dict[str, str] = {}
"""Temporary directories that hold copies of remote files, with the address of each"""


def known_as(directory: Path, address: str) -> None:
    """Show ``address`` instead of this temporary directory in all errors."""
    _ADDRESSES[str(directory)] = address


_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)")
_IN_PYTHON = {
    **{
        flag: f"{flag.replace('-', '_')}=True"
        for flag in ("partial", "allow-duplicate", "allow-other-base", "overwrite")
    },
    **{flag: f"{flag}=[…]" for flag in ("heads", "ignore", "only", "without")},
    **{flag: f"{flag}=…" for flag in ("vocab", "name", "readout", "task", "rank", "dtype")},
    **{"base": "store.relocate(…)", "max-memory": "LocalEngine(max_memory=…)", "workers": "LocalEngine(workers=…)"},
}
"""What flags of the command line are in Python"""


class MergestreamError(Exception):
    """The input or the store is at fault. The message says what is wrong, where, and what to do."""

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "input"
    """The kind of error, in ``--json``"""

    def __init__(self, message: str = "") -> None:
        for directory, address in _ADDRESSES.items():
            message = message.replace(directory, address)
        super().__init__(message)
        named = dict.fromkeys(_IN_PYTHON[flag] for flag in _FLAG.findall(message) if flag in _IN_PYTHON)
        if named and hasattr(self, "add_note"):  # not in Python 3.10
            self.add_note(f"In Python: {', '.join(named)}")

    @property
    def sentences(self) -> Sequence[str]:
        """The lines that the command line prints."""
        return (str(self),)


class UsageError(MergestreamError):
    """The call is wrong: an unknown method, a parameter out of range."""

    exit_code: ClassVar[int] = 2
    kind = "usage"


class StoreBusyError(MergestreamError):
    """Another process is writing to the store, or to the same output."""

    exit_code: ClassVar[int] = 3
    kind = "busy"


class EngineError(MergestreamError):
    """The engine cannot be reached or was lost. The models are fine, and finished tensors are kept."""

    kind = "engine"


class DamagedError(MergestreamError):
    """The store or its base has changed on disk, so no command can use it."""

    kind = "damaged"


class MergestreamWarning(UserWarning):
    """A note for the user, raised as a warning where no progress display shows it."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean …?`` if a known word is close to ``word``, else an empty string."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, or the error's type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
