"""Errors that a user can act on: one sentence each, printed as ``error: …`` by the command line."""

from typing import ClassVar


class MergestreamError(Exception):
    """The input or the store is at fault; the message says what, where, and what to do."""

    exit_code: ClassVar[int] = 1


class UsageError(MergestreamError):
    """The call itself is wrong: an unknown method, a parameter out of range."""

    exit_code: ClassVar[int] = 2


class StoreBusyError(MergestreamError):
    """Another process is writing to the store."""

    exit_code: ClassVar[int] = 3
