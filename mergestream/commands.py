"""The user's ``--evaluate`` command: check it, run it without a shell, and find the score in its output."""

from __future__ import annotations

import os
import re
import selectors
import shlex
import subprocess

from mergestream.errors import MergestreamError, UsageError

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_STANDALONE_NUMBER = re.compile(rf"(?<![\w.])(?:{NUMBER}|[-+]?(?:nan|inf(?:inity)?))(?!\w|\.\d)", re.IGNORECASE)
MODEL = "{model}"
"""Placeholder for the directory of the model"""
SCORES = "{scores}"
"""Placeholder for the directory that the command writes its results to"""
_MOST_OUTPUT = 1 << 20
"""How many bytes of a command's output are kept; older output is dropped"""


class CommandError(MergestreamError):
    """The user's command cannot be run, fails, or prints no score."""


def check_command(template: str) -> None:
    """Refuse a command line that has unbalanced quotes or no ``{model}``, before any work is done."""
    try:
        parts = shlex.split(template)
    except ValueError as error:
        raise UsageError(f"--evaluate {template!r} is not a command line: {error}") from None
    if not any(MODEL in part for part in parts):
        raise UsageError(f"--evaluate {template!r} does not contain {MODEL}; write it where the model's path belongs")


def run_command(template: str, *, show_errors: bool = False, **places: object) -> str:
    """Run the command and return its standard output.

    ``places`` fill the template's placeholders, such as ``{model}``. Standard error goes to the terminal with
    ``show_errors``; otherwise its last line becomes the reason in `CommandError` if the command fails.
    """

    def fill(part: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda place: str(places.get(place[1], place[0])), part)

    arguments = [fill(part) for part in shlex.split(template)]
    errors = None if show_errors else subprocess.PIPE
    try:
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors)
    except OSError as error:
        raise CommandError(f"--evaluate: {arguments[0]} cannot be run: {error.strerror}") from error
    try:
        printed, complaints = _read_output(process)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode:
        lines = [line.strip() for line in complaints.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {process.returncode}"
        raise CommandError(f"--evaluate: {arguments[0]} failed: {reason}")
    return printed


def _read_output(process: subprocess.Popen[bytes]) -> list[str]:
    """Read the end of standard output and standard error until the process exits.

    `subprocess.communicate` would also wait for background processes that inherited the streams.
    """
    streams = (process.stdout, process.stderr)
    outputs = [bytearray() for _ in streams]
    with selectors.DefaultSelector() as selector:
        for stream, output in zip(streams, outputs, strict=True):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, output)
        left = _MOST_OUTPUT  # to read after the exit, as a background process may print forever
        while selector.get_map() and left > 0:
            exited = process.poll() is not None
            ready = selector.select(0 if exited else 0.1)
            if exited and not ready:
                break
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fileobj)
                output = key.data
                output += piece
                del output[:-_MOST_OUTPUT]
                left -= len(piece) if exited else 0
    process.wait()
    for stream in streams:
        if stream is not None:
            stream.close()
    return [output.decode(errors="replace") for output in outputs]


def last_number(text: str) -> float | None:
    """Find the last number that is a word of its own (not the 2 in ``v2``); it may be infinite or NaN."""
    numbers = _STANDALONE_NUMBER.findall(text)
    return float(numbers[-1]) if numbers else None
