"""Errors that a user can act on: one sentence each, printed as ``error: …`` by the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

_ADDRESSES: dict[str, str] = {}
"""Temporary directories that hold copies of remote files, with the address of each"""


def known_as(directory: Path, address: str) -> None:
    """Show ``address`` instead of this temporary directory in all errors."""
    _ADDRESSES[str(directory)] = address


_FLAG = re.compile(r"mergestream init|--format \w+|--[a-z]+(?:-[a-z]+)*")
_SWITCHES = ("partial", "allow-duplicate", "allow-other-base", "overwrite", "private")
_LISTS = ("heads", "ignore", "linear", "not-linear", "only", "without")
_VALUES = ("vocab", "name", "method", "evaluate", "evaluate-timeout", "log", "engine")
_AT_EXPORT = ("readout", "task", "files-from", "rank", "layout", "dtype")
_OF_ENGINE = ("workers", "max-memory", "device")
_IN_PYTHON = {
    **{f"--{flag}": f"{flag}=True" for flag in _SWITCHES},
    **{f"--{flag}": f"{flag}=[…]" for flag in _LISTS},
    **{f"--{flag}": f"{flag}=…" for flag in (*_VALUES, *_AT_EXPORT)},
    **{f"--{flag}": f"LocalEngine({flag}=…)" for flag in _OF_ENGINE},
    "--for": "server=…",
    "--weight": "weights={…}",
    "--set": "method=Ledger(budget=…)",
    "--base": "store.relocate(…)",
    "--format full": "store.export(…)",
    "--format lora": "store.export_adapter(…)",
    "--format loras": "store.export_adapters(…)",
    "--format routed": "store.export_routed(…)",
    "mergestream init": "Store.create(…)",
}
"""What flags and commands of the command line are in Python"""


is_command_line = False
"""Whether the user of this process typed flags; then messages name no Python arguments"""


def in_python(message: str) -> str:
    """Name the Python arguments for the flags in a message: ``In Python: partial=True``; empty if there are none."""
    found = _FLAG.findall(message)
    if "mergestream init" in found:
        found = ["mergestream init"]  # its flags are arguments of `Store.create`
    named = dict.fromkeys(_IN_PYTHON[flag].replace("-", "_") for flag in found if flag in _IN_PYTHON)
    return f"In Python: {', '.join(named)}" if named else ""


class MergestreamError(Exception):
    """The input or the store is at fault. The message says what is wrong, where, and what to do."""

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "input"
    """The kind of error, in ``--json``"""

    def __init__(self, message: str = "") -> None:
        for directory, address in _ADDRESSES.items():
            message = message.replace(directory, address)
        named = "" if is_command_line or "(In Python: " in message else in_python(message)
        if named and not hasattr(self, "add_note"):  # in Python 3.10
            message, named = f"{message} ({named})", ""
        super().__init__(message)
        if named:
            self.add_note(named)

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


@contextmanager
def package_needed(what: str, extra: str) -> Iterator[None]:
    """Explain a failed import: ``what`` needs a package of an extra of ours."""
    try:
        yield
    except ImportError as error:
        name = (error.name or extra).partition(".")[0]
        raise MergestreamError(f"{what} needs the package {name}: pip install 'mergestream[{extra}]'") from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean …?`` if a known word is close to ``word``, else an empty string."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, or the error's type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
