"""``rank_pattern`` and ``alpha_pattern``: numbers by module, looked up by regular expressions as in PEFT.

Python's ``re`` takes exponential time for some expressions, and these come from untrusted files. So only expressions
that ``re`` can match in few ways are accepted: no repeats of groups, and a bounded number of repeats and alternatives.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from mergestream.errors import MergestreamError

# The parser of ``re`` has no public name.
_NEW = sys.version_info >= (3, 11)
parser: Any = import_module("re._parser" if _NEW else "sre_parse")
sre: Any = import_module("re._constants" if _NEW else "sre_constants")

MAX_EXPRESSION = 1000
MAX_NAME = 200
"""Characters of a module's name"""
MAX_WAYS = 10**7
"""Ways to match a name of 50 characters: four repeats, or three and 80 alternatives"""
MAX_SECONDS = 30.0
"""Time of all look-ups in one table"""
_CHARACTERS = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT)
_ANCHORS = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING, sre.AT_END, sre.AT_END_STRING)


class PatternTable:
    """Values by expression; a module gets the value of the first one that matches the end of its path."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        """Compile the expressions; ValueError for an invalid or unsupported one."""
        self.values = dict(values or {})
        self._expressions = {key: _compile(key) for key in self.values}
        self._seconds = 0.0

    def get(self, module: str, default: Any) -> Any:
        """The value for a module; a match must begin at the start of the name or after a dot."""
        if self.values and len(module) > MAX_NAME:
            raise MergestreamError(f"the adapter has a module whose name is too long: {module}")
        starts = [0, *(dot.end() for dot in re.finditer(r"\.", module))]
        for key, expression in self._expressions.items():
            began = time.perf_counter()
            if any(expression.fullmatch(module, start) for start in starts):
                return self.values[key]
            self._seconds += time.perf_counter() - began
            if self._seconds > MAX_SECONDS:
                raise MergestreamError(
                    f"a rank_pattern or alpha_pattern of {len(self.values)} expressions takes too long to match the "
                    "modules; merge the adapter into its model with PEFT's merge_and_unload"
                )
        return default


def _compile(expression: str) -> re.Pattern[str]:
    if len(expression) > MAX_EXPRESSION:
        raise ValueError("it is too long")
    try:
        compiled, tree = re.compile(expression), parser.parse(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if compiled.flags & ~re.UNICODE:
        raise ValueError("flags are not supported")
    if _count_ways(tree) > MAX_WAYS:
        raise ValueError("it could take too long to match")
    return compiled


def _count_ways(tree: Any) -> int:
    """An upper bound of the ways in which an expression can match a name of 50 characters."""
    ways = 1
    for op, argument in tree:
        if op is sre.BRANCH:
            ways *= sum(map(_count_ways, argument[1]))
        elif op is sre.SUBPATTERN and not any(argument[1:3]):
            ways *= _count_ways(argument[3])
        elif op in _REPEATS and argument[1] == 1:
            ways *= 1 + _count_ways(argument[2])
        elif op in _REPEATS and [part[0] in _CHARACTERS for part in argument[2]] == [True]:
            ways *= min(int(argument[1]) - int(argument[0]), 49) + 1
        elif op not in _CHARACTERS and not (op is sre.AT and argument in _ANCHORS):
            raise ValueError(f"{str(op).lower()} is not supported here")
    return ways
