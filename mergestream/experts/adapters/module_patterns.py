"""``rank_pattern`` and ``alpha_pattern``: numbers by module, looked up by regular expressions in bounded time.

Python's ``re`` takes exponential time for some expressions, and these come from untrusted files. Here only the question
matters whether a name matches to its end. So for every part of an expression and every start, the set of possible ends
is computed once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from mergestream.errors import MergestreamError

# The parser of ``re`` has no public name.
_NEW = sys.version_info >= (3, 11)
parser: Any = import_module("re._parser" if _NEW else "sre_parse")
sre: Any = import_module("re._constants" if _NEW else "sre_constants")

MAX_LENGTH = 1000
"""Characters of an expression, or of a module's name"""
MAX_STEPS = 2_000_000
"""Steps of all look-ups in one table, about ten seconds"""
_CHARACTERS = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT)
_BEGINNINGS = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING)
_ENDS = (sre.AT_END, sre.AT_END_STRING)
_CATEGORIES = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    sre.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    sre.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}
Places = frozenset[int]


class PatternTable:
    """Values by expression; a module gets the value of the first one that matches the end of its path."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        """Parse the expressions; ValueError for an invalid or unsupported one."""
        self.values = dict(values or {})
        self._expressions = {key: _parse(key) for key in self.values}
        self._steps = 0

    def get(self, module: str, default: Any) -> Any:
        """The value for a module; a match must begin at the start of the name or after a dot."""
        if self.values and len(module) > MAX_LENGTH:
            raise MergestreamError(f"the adapter has a module whose name is too long: {module}")
        matcher, starts = _Matcher(module, self._count), [0, *(dot.end() for dot in re.finditer(r"\.", module))]
        for key, expression in self._expressions.items():
            self._count(1)
            if isinstance(expression, re.Pattern):
                found = any(expression.fullmatch(module, start) for start in starts)
            else:
                found = any(len(module) in matcher.ends(expression, start) for start in starts)
            if found:
                return self.values[key]
        return default

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise MergestreamError(
                f"a rank_pattern or alpha_pattern of {len(self.values)} expressions takes too long to match the "
                "modules; merge the adapter into its model with PEFT's merge_and_unload"
            )


def _parse(expression: str) -> Any:
    """The parse tree; or the compiled expression if it has no choices, so that ``re`` is fast."""
    if len(expression) > MAX_LENGTH:
        raise ValueError("it is too long")
    try:
        compiled, tree = re.compile(expression), parser.parse(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if compiled.flags & ~re.UNICODE:
        raise ValueError("flags are not supported")
    _check_supported(tree)
    return compiled if all(op in _CHARACTERS or op is sre.AT for op, _ in tree) else tree


def _check_supported(tree: Any) -> None:
    for op, argument in tree:
        known = op in _CHARACTERS or (op is sre.AT and argument in (*_BEGINNINGS, *_ENDS))
        known = known or op in (*_REPEATS, sre.BRANCH) or (op is sre.SUBPATTERN and not any(argument[1:3]))
        if not known:
            raise ValueError(f"{op} is not supported")
        for part in _children(op, argument):
            _check_supported(part)


def _children(op: Any, argument: Any) -> Iterable[Any]:
    """The sequences inside a part of an expression."""
    if op is sre.BRANCH:
        return list(argument[1])
    if op is sre.SUBPATTERN:
        return (argument[3],)
    return (argument[2],) if op in _REPEATS else ()


class _Matcher:
    """Finds where parts of an expression may end in a text."""

    def __init__(self, text: str, count: Callable[[int], None]) -> None:
        self._text, self._count = text, count
        self._known: dict[tuple[int, int], Places] = {}

    def ends(self, tree: Any, start: int) -> Places:
        """Where a sequence that begins at ``start`` may end."""
        key = id(tree), start
        if key not in self._known:
            places: Places = frozenset((start,))
            for op, argument in tree:
                places = self._union(self._ends(op, argument, place) for place in places)
            self._known[key] = places
        return self._known[key]

    def _ends(self, op: Any, argument: Any, start: int) -> Iterator[int]:
        if op in _REPEATS:
            least, most, tree = argument
            yield from self._repeated(int(least), int(most), tree, start)
        elif op is sre.AT:
            if start == (0 if argument in _BEGINNINGS else len(self._text)):
                yield start
        elif op in _CHARACTERS:
            if start < len(self._text) and _matches(op, argument, self._text[start]):
                yield start + 1
        else:
            for part in _children(op, argument):
                yield from self.ends(part, start)

    def _repeated(self, least: int, most: int, tree: Any, start: int) -> Places:
        enough = len(self._text) + 1  # more rounds than characters contain empty ones, which change nothing
        places, found = frozenset((start,)), set[int]()
        for count in range(min(most, enough) + 1):
            if count >= min(least, enough):
                if most >= enough and places <= found:
                    break
                found |= places
            places = self._union(self.ends(tree, place) for place in places)
        return frozenset(found)

    def _union(self, parts: Iterable[Iterable[int]]) -> Places:
        places = [place for part in parts for place in part]
        self._count(1 + len(places))
        return frozenset(places)


def _matches(op: Any, argument: Any, character: str) -> bool:
    """Whether a part that matches one character matches this one."""
    if op is sre.IN:
        items = [item for item in argument if item[0] is not sre.NEGATE]
        return any(_matches(kind, value, character) for kind, value in items) == (len(items) == len(argument))
    if op is sre.RANGE:
        return bool(argument[0] <= ord(character) <= argument[1])
    if op is sre.CATEGORY:
        return _CATEGORIES[argument](character)
    return {sre.ANY: character != "\n", sre.LITERAL: ord(character) == argument}.get(op, ord(character) != argument)
