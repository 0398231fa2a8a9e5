"""``rank_pattern`` and ``alpha_pattern``: numbers by module, looked up by regular expressions in bounded time.

Python's ``re`` takes exponential time for some expressions, and these come from untrusted files. So an expression is
accepted only if the number of ways to match it is bounded: repeats apply to single characters, never to groups.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from mergestream.errors import MergestreamError

MAX_LENGTH = 1000
"""Characters of an expression"""
MAX_NAME = 200
"""Characters of a module's name"""
MAX_WAYS = 10_000_000
"""Ways to match one name, tried in about a second"""
MAX_SECONDS = 10.0
"""Time for all look-ups in one table"""
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]])*\]|\(\?:|\(\?|\{[^}]*\}|.", re.DOTALL)


class PatternTable:
    """Values by expression; a module gets the value of the first one that matches the end of its path."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        """Compile the expressions; ValueError for an invalid or unsupported one."""
        self.values = dict(values or {})
        self._expressions = {key: _compile(key) for key in self.values}
        self._seconds = 0.0

    def get(self, module: str, default: Any) -> Any:
        """The value for a module; a match must begin at the start of the name or after a dot, as in PEFT."""
        if not self.values:
            return default
        if len(module) > MAX_NAME:
            raise MergestreamError(f"the adapter has a module whose name is too long: {module}")
        started = time.monotonic()
        starts = [0, *(dot.end() for dot in re.finditer(r"\.", module))]
        for key, expression in self._expressions.items():
            if any(expression.fullmatch(module, start) for start in starts):
                return self.values[key]
            if self._seconds + time.monotonic() - started > MAX_SECONDS:
                raise MergestreamError(
                    f"a rank_pattern or alpha_pattern of {len(self.values)} expressions takes too long to match the "
                    "modules; merge the adapter into its model with PEFT's merge_and_unload"
                )
        self._seconds += time.monotonic() - started
        return default


def _compile(expression: str) -> re.Pattern[str]:
    if len(expression) > MAX_LENGTH:
        raise ValueError("it is too long")
    try:
        compiled = re.compile(f"(?:{expression})")
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if _count_ways(expression) > MAX_WAYS:
        raise ValueError("it could take too long to match")
    return compiled


def _count_ways(expression: str) -> int:
    """An upper bound of the ways to match a name: the product of the choices at every part of the expression."""
    ways, alternatives, previous = 1, [1], ""
    for token in _TOKENS.findall(expression):
        if token == "(?" or re.fullmatch(r"\\[\dAbBZ]", token):
            raise ValueError(f"{token} is not supported")
        if token in ("(", "(?:"):
            alternatives.append(1)
        elif token == ")":
            ways *= alternatives.pop()
        elif token == "|":
            alternatives[-1] += 1
        elif token == "?":
            ways *= 1 if previous in ("*", "+", "?") else 2  # after a repeat it means: as few as possible
        elif token in ("*", "+") or (token[0] == "{" and token[1:2].isdigit()):
            if previous == ")":
                raise ValueError("a repeated group is not supported")
            ways *= MAX_NAME
        previous = token
    return ways * alternatives.pop()
