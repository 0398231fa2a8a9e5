"""What a family of cases is: an iterable of named cases, each of which says what went wrong, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

Check = Callable[[Path], "str | None"]
"""Runs in a process and in an empty directory of its own; None when clean, else a sentence"""


class Case(NamedTuple):
    name: str
    run: Check


Family = Callable[[Path], Iterable[Case]]
"""Makes its cases; what they share it may put into the directory. The same cases in the same order every time."""
