"""What options are parsed into; a wrong value is one sentence that says what would be right."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mergestream.errors import UsageError
from mergestream.sizes import parse_size


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that counts something."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is too small; the least is {least}")
        return number

    return parse


def size(text: str) -> int:
    """Bytes, as in 4GB."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
