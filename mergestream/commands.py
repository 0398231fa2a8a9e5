"""A user's command that scores a model: checked before any work, run without a shell, read for its number."""

from __future__ import annotations

import re
import shlex
import subprocess

from mergestream.errors import MergestreamError, UsageError

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_STANDALONE_NUMBER = re.compile(rf"(?<![\w.]){NUMBER}(?!\w|\.\d)")
MODEL = "{model}"


def check_command(template: str) -> None:
    """Refuse a command line that cannot be meant, before any work is done."""
    try:
        parts = shlex.split(template)
    except ValueError as error:
        raise UsageError(f"--evaluate {template!r} is not a command line: {error}") from None
    if not any(MODEL in part for part in parts):
        raise UsageError(f"--evaluate {template!r} does not say where the model goes; write {MODEL} in its place")


def run_command(template: str, *, show_errors: bool = False, **places: object) -> str:
    """What the command prints, with ``places`` put where the template names them, as in ``{model}``.

    What it says on standard error goes on to the user (``show_errors``), or is kept for its last line, which is then
    the reason of a failure.
    """

    def filled(part: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda place: str(places.get(place[1], place[0])), part)

    arguments = [filled(part) for part in shlex.split(template)]
    errors = None if show_errors else subprocess.PIPE
    try:
        done = subprocess.run(
            arguments, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise MergestreamError(f"{arguments[0]} of --evaluate cannot be run: {error.strerror}") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or "").splitlines() if line.strip()]
        reason = lines[-1] if lines else f"it ended with code {done.returncode}"
        raise MergestreamError(f"{arguments[0]} of --evaluate failed: {reason}")
    return done.stdout


def last_number(text: str) -> float | None:
    """The last number that stands by itself: not the 2 of ``v2``."""
    numbers = _STANDALONE_NUMBER.findall(text)
    return float(numbers[-1]) if numbers else None
