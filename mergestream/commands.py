"""A user's command that scores a model: checked before any work, run without a shell, read for its number."""

from __future__ import annotations

import os
import re
import selectors
import shlex
import subprocess
from collections.abc import Sequence
from typing import IO

from mergestream.errors import MergestreamError, UsageError

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_STANDALONE_NUMBER = re.compile(rf"(?<![\w.])(?:{NUMBER}|[-+]?(?:nan|inf(?:inity)?))(?!\w|\.\d)", re.IGNORECASE)
MODEL = "{model}"
SCORES = "{scores}"
"""A directory for what the command writes"""
_KEPT = 1 << 20
"""Bytes of what a command prints that are kept, the last ones: it may print without end"""


class CommandError(MergestreamError):
    """A user's command cannot be run, fails, or says nothing that counts."""


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
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors)
    except OSError as error:
        raise CommandError(f"{arguments[0]} of --evaluate cannot be run: {error.strerror}") from error
    try:
        printed, complaints = _read_to_the_end(process, [process.stdout, process.stderr])
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode:
        lines = [line.strip() for line in complaints.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"it ended with code {process.returncode}"
        raise CommandError(f"{arguments[0]} of --evaluate failed: {reason}")
    return printed


def _read_to_the_end(process: subprocess.Popen[bytes], streams: Sequence[IO[bytes] | None]) -> list[str]:
    """The last of what each stream has to say until the process ends, be they still open in what it has started."""
    said = [bytearray() for _ in streams]
    with selectors.DefaultSelector() as selector:
        for stream, text in zip(streams, said, strict=True):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, text)
        left = _KEPT
        while selector.get_map() and left > 0:
            ended = process.poll() is not None
            ready = selector.select(0 if ended else 0.1)
            if ended and not ready:
                break
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fileobj)
                text = key.data
                text += piece
                del text[:-_KEPT]
                left -= len(piece) if ended else 0
    process.wait()
    for stream in streams:
        if stream is not None:
            stream.close()
    return [text.decode(errors="replace") for text in said]


def last_number(text: str) -> float | None:
    """The last number that stands by itself: not the 2 of ``v2``; it may be one that is not finite."""
    numbers = _STANDALONE_NUMBER.findall(text)
    return float(numbers[-1]) if numbers else None
