"""Functions and commands in forked children: cheap, as torch is imported once, and free to die."""

from __future__ import annotations

import os
import pickle
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

LIMIT = 60.0
"""Seconds after which something hangs"""


class Outcome(NamedTuple):
    """How a child has ended: its exit code (negative for a signal), what it printed, and what it returned."""

    code: int
    out: str
    err: str
    result: Any = None

    @property
    def was_killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def fault(self) -> str | None:
        """What is wrong with how a command ended, if anything: an error is one sentence, and no escape."""
        if self.was_killed:
            return None
        if "Traceback (most recent call last)" in self.err + self.out:
            return f"a traceback: {self.err.strip().splitlines()[-1]}"
        errors = [line for line in self.err.splitlines() if line.startswith("error: ")]
        strays = [line for line in self.err.splitlines() if not line.startswith(("error: ", "note: ", "warning: "))]
        if strays:
            return f"a stray line on standard error: {strays[0]!r}"
        if self.code in (1, 2, 3, 130, 143) and len(errors) != 1:
            return f"exit code {self.code} with {len(errors)} sentences"
        if self.code not in (0, 1, 2, 3, 130, 143):
            return f"it ended with {self.code}"
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", self.err):
            return f"an escape in {self.err!r}"
        if any(len(line) > 2000 for line in self.err.splitlines()):
            return "an error of more than 2,000 characters"
        return None


def start(function: Callable[[], Any], cwd: Path | None = None) -> Child:
    """Run a function in a child; its return value must be picklable, its output goes to files in memory."""
    streams = [os.memfd_create(name) for name in ("out", "err", "result")]
    sys.stdout.flush(), sys.stderr.flush()
    process = os.fork()
    if process:
        return Child(process, streams)
    code = 70
    try:
        os.dup2(streams[0], 1), os.dup2(streams[1], 2)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        if cwd:
            os.chdir(cwd)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the command begins, which minds it
        result = function()
        code = result if isinstance(result, int) else 0
        os.write(streams[2], pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code & 0xFF)


class Child(NamedTuple):
    """A process that was started here."""

    process: int
    streams: Sequence[int]

    def wait(self, limit: float = LIMIT) -> Outcome:
        """Its outcome; one that takes longer is killed, and said to hang."""
        hangs = not self.ended(limit)
        if hangs:
            os.kill(self.process, signal.SIGKILL)
        _, status = os.waitpid(self.process, 0)
        out, err, result = map(_content, self.streams)
        if hangs:
            return Outcome(70, "", f"Traceback (most recent call last)\nit hangs: not done after {limit:.0f} s")
        code = os.waitstatus_to_exitcode(status)
        return Outcome(code, out.decode(), err.decode(), pickle.loads(result) if result else None)

    def ended(self, limit: float) -> bool:
        """Whether it ends within so many seconds."""
        handle = os.pidfd_open(self.process)
        try:
            return bool(select.select([handle], [], [], limit)[0])
        finally:
            os.close(handle)


def _content(file: int) -> bytes:
    try:
        return os.pread(file, os.fstat(file).st_size, 0)
    finally:
        os.close(file)


def run(function: Callable[[], Any], cwd: Path | None = None, limit: float = LIMIT) -> Outcome:
    return start(function, cwd).wait(limit)


def in_process(call: Callable[[], int]) -> Outcome:
    """The same in this process, for a case that has one of its own: a fork takes longer than most commands."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = call()
    return Outcome(code, out.getvalue(), err.getvalue())


def command(*words: object) -> Callable[[], int]:
    """A command line of mergestream, to be run in a child."""

    def call() -> int:
        from mergestream.cli import main

        arguments = list(map(str, words))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with patch.object(sys, "argv", ["mergestream", *arguments]):  # for model cards
                return main(arguments)
        except SystemExit as exit:  # argparse
            return int(exit.code or 0)

    return call
