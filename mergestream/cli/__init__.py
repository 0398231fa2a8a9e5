"""The command line. Errors are one line on standard error; exit codes say whose fault it was."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mergestream.cli.parser import make_parser
from mergestream.errors import MergestreamError

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """0 done, 1 the input or the store is at fault, 2 wrong usage, 3 the store is busy."""
    parsed = make_parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
        return code
    except MergestreamError as error:
        for sentence in str(error).splitlines():
            print(f"error: {sentence}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; the store is as it was, the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1
