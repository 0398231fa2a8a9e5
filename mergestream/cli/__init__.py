# PYTHON_ARGCOMPLETE_OK
"""The command line. Errors are single lines on standard error, and exit codes tell kinds of errors apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper

from mergestream.cli.parser import COMMANDS, make_parser, parse, wants_json
from mergestream.cli.printing import error_kind, error_sentences, finish, print_error, replying
from mergestream.errors import MergestreamError
from mergestream.escaping import check_utf8
from mergestream.interrupts import Terminated, terminated_like_interrupted

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after a signal: 128 plus its number, as in a shell"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: success. 1: the input or the store is at fault. 2: wrong usage. 3: the store is busy.
    4: a gate refused an expert. 130, 143: interrupted.
    """
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        import argcomplete

        argcomplete.autocomplete(make_parser(COMMANDS)[0], always_complete_options=False)
    words = sys.argv[1:] if arguments is None else arguments
    with terminated_like_interrupted(), replying(wants_json(words)):
        return _run(words)


def _run(words: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # for terminals that cannot show λ
    try:
        command = parse(words)
        for word in words:
            check_utf8(word)
        command.run()
        finish()
        return 0
    except KeyboardInterrupt as interrupt:
        what, code = ("terminated", TERMINATED) if isinstance(interrupt, Terminated) else ("interrupted", INTERRUPTED)
        advice = str(interrupt) or "finished steps are kept, and the same command continues where this one stopped"
        return _fail(code, what, f"{what}; {advice}")
    except BrokenPipeError:  # discard the rest, so that flushing at exit does not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MergestreamError, OSError) as error:
        return _fail(getattr(error, "exit_code", 1), error_kind(error), *error_sentences(error))
    except ModuleNotFoundError as error:
        everything = "pip install 'mergestream[all]' (for the suites of a checkout 'mergestream[all,suites]')"
        return _fail(1, "input", f"the Python module {error.name} is not installed; {everything}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return _fail(1, "memory", "out of memory; lower --max-memory, or use fewer --workers")


def _fail(code: int, kind: str, *reasons: str) -> int:
    print_error(*reasons)
    with suppress(OSError):  # standard output may be what failed
        finish(*reasons, kind=kind)
    return code
