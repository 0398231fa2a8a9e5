# PYTHON_ARGCOMPLETE_OK
"""The command line. Errors are one line on standard error; exit codes say whose fault it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper

from mergestream.cli.options import RunningOptions
from mergestream.cli.parser import asks_for_json, parse
from mergestream.cli.printing import finish, print_error, replying
from mergestream.errors import MergestreamError
from mergestream.escaping import check_utf8
from mergestream.interrupts import Terminated, terminated_like_interrupted

INTERRUPTED, TERMINATED = 130, 143
"""128 and the number of the signal, as a shell says it"""
_WHERE = "the store is at its last finished step, and what was cut short goes on when it is asked for again"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 done, 1 the input or the store is at fault, 2 wrong usage, 3 the store is busy."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks, and not its user
        from mergestream.cli.completion import complete

        complete()
    words = sys.argv[1:] if arguments is None else arguments
    with terminated_like_interrupted(), replying(asks_for_json(words)):
        return _main(words)


def _main(words: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show λ is no reason to fail
    try:
        command, options = parse(words)
        for word in words:
            check_utf8(word)
        if isinstance(options, RunningOptions):
            options.use_cache()
        code = command.run(options)
        finish()
        return code
    except MergestreamError as error:
        return _fail(error.exit_code, *error.sentences)
    except KeyboardInterrupt as interrupt:
        what, code = ("terminated", TERMINATED) if isinstance(interrupt, Terminated) else ("interrupted", INTERRUPTED)
        return _fail(code, f"{what}; {str(interrupt) or _WHERE}")
    except BrokenPipeError:  # nobody reads on; nothing that is still buffered may complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f"{error.filename} cannot be used: " if error.filename else ""
        return _fail(MergestreamError.exit_code, f"{where}{error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return _fail(MergestreamError.exit_code, "out of memory; allow less with --max-memory, or use fewer --workers")


def _fail(code: int, *reasons: str) -> int:
    print_error(*reasons)
    with suppress(OSError):  # where that is what it failed by
        finish(*reasons)
    return code
