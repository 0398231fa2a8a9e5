"""The user's ``--evaluate`` command: check it, run it without a shell, and find the score in its output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from tempfile import TemporaryFile
from typing import IO

from mergestream.errors import MergestreamError, UsageError

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_STANDALONE_NUMBER = re.compile(rf"(?<![\w.])(?:{NUMBER}|[-+]?(?:nan|inf(?:inity)?))(?!\w|\.\d)", re.IGNORECASE)
MODEL = "{model}"
"""Placeholder for the directory of the model"""
SCORES = "{scores}"
"""Placeholder for the directory that the command writes its results to"""
_MOST_OUTPUT = 1 << 20
"""How many bytes of a command's output are read, from its end"""


class CommandError(MergestreamError):
    """The user's command cannot be run, fails, takes too long, or prints no score."""

    kind = "command"


def check_command(template: str) -> None:
    """Refuse a command line that has unbalanced quotes or no ``{model}``, before any work is done."""
    try:
        parts = shlex.split(template)
    except ValueError as error:
        raise UsageError(f"--evaluate {template!r} is not a command line: {error}") from None
    if not any(MODEL in part for part in parts):
        raise UsageError(f"--evaluate {template!r} does not contain {MODEL}; write it where the model's path belongs")


def run_command(template: str, timeout: float | None = None, *, show_errors: bool = False, **places: object) -> str:
    """Run the command and return the end of its standard output; after ``timeout`` seconds it is stopped.

    ``places`` fill the template's placeholders, such as ``{model}``. Standard error goes to the terminal with
    ``show_errors``; otherwise its last line becomes the reason in `CommandError` if the command fails.
    """
    words = shlex.split(template)
    arguments = [re.sub(r"\{(\w+)\}", lambda place: str(places.get(place[1], place[0])), word) for word in words]
    # Files, not pipes: a background process may keep a pipe open for ever.
    with TemporaryFile() as output, TemporaryFile() as errors:
        try:
            stderr = None if show_errors else errors
            code = subprocess.run(arguments, stdout=output, stderr=stderr, timeout=timeout).returncode
        except subprocess.TimeoutExpired as error:
            wait = f"it has not ended after {timeout:g} s; to wait longer, pass --evaluate-timeout SECONDS"
            raise CommandError(f"--evaluate: {arguments[0]} was stopped: {wait}") from error
        except OSError as error:
            raise CommandError(f"--evaluate: {arguments[0]} cannot be run: {error.strerror}") from error
        if code:
            lines = [line.strip() for line in _read_end(errors).splitlines() if line.strip()]
            reason = lines[-1] if lines else f"exit code {code}"
            raise CommandError(f"--evaluate: {arguments[0]} failed: {reason}")
        return _read_end(output)


def _read_end(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_OUTPUT))
    return file.read(_MOST_OUTPUT).decode(errors="replace")


def last_number(text: str) -> float | None:
    """Find the last number that is a word of its own (not the 2 in ``v2``); it may be infinite or NaN."""
    numbers = _STANDALONE_NUMBER.findall(text)
    return float(numbers[-1]) if numbers else None
