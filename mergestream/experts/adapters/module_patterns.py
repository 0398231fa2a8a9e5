"""``rank_pattern`` and ``alpha_pattern``: numbers by module, looked up by regular expressions as in PEFT.

Python's ``re`` takes exponential time for some expressions, and these come from untrusted files. So only expressions
that ``re`` can match in few ways are accepted: no repeats of groups, and a bounded number of repeats and alternatives.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any

from mergestream.errors import MergestreamError

MAX_EXPRESSION = 1000
MAX_NAME = 200
"""Characters of a module's name"""
MAX_WAYS = 10**7
"""Ways to match a name of 50 characters: four repeats, or three and 80 alternatives"""
MAX_SECONDS = 30.0
"""Time of all look-ups in one table"""


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
        for key, expression in self._expressions.items():
            began = time.perf_counter()
            if expression.fullmatch(module):
                return self.values[key]
            self._seconds += time.perf_counter() - began
            if self._seconds > MAX_SECONDS:
                raise MergestreamError(
                    f"a rank_pattern or alpha_pattern of {len(self.values)} expressions takes too long to match the "
                    "modules; merge the adapter into its model with PEFT's merge_and_unload"
                )
        return default


def _compile(expression: str) -> re.Pattern[str]:
    """Compile an expression of characters, classes, alternatives, groups that are not repeated, and few repeats."""
    if len(expression) > MAX_EXPRESSION:
        raise ValueError("it is too long")
    characters = re.sub(r"\\[.dDwWsS_-]", "x", expression)
    plain = re.sub(r"\[\^?\]?[^]]*\]", "x", characters).replace("(?:", "(")
    if re.search(r"\\|\(\?|\)[*+?]|\{", plain):
        raise ValueError("repeated groups, counted repeats, flags and special sequences are not supported")
    alternatives = math.prod(group.count("|") + 1 for group in plain.split(")"))
    if 50 ** len(re.findall(r"[*+]", plain)) * 2 ** plain.count("?") * alternatives > MAX_WAYS:
        raise ValueError("it could take too long to match")
    try:
        return re.compile(rf"(?:.*\.)?(?:{expression})")
    except re.error as error:
        raise ValueError(str(error)) from error
