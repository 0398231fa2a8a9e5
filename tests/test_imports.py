"""Imports point downwards only: whoever reads a room need not know those above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mergestream

PACKAGE = Path(mergestream.__file__).parent
ORDER = [
    *("errors", "escaping", "display", "sizes", "digest", "objects", "files", "schema", "progress", "interrupts"),
    *("registry", "commands"),
    *("engine", "checkpoints", "algebra", "base", "experts", "methods", "ledger", "merging", "training"),
    *("store", "export", "hub", "report", "tracking", "mergekit", "api", "replay"),
    *("evaluation", "testing", "cli", "__init__", "__main__"),
]
"""The rooms of the package, files and folders, the lowest first; within a folder all is allowed"""


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """The room of every module that a file imports, at its top, lazily or for types only, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = f"{name}.__init__".partition(".")
            if package == PACKAGE.name and name != "mergestream.__version__":  # all else is at home in a room
                yield rest.partition(".")[0], node.lineno


def test_imports_point_downwards_only():
    upwards = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        room = place.with_suffix("").parts[0]
        assert room in ORDER, f"{place}: the room {room} has no place in the order"
        for other, line in imported(path):
            if other not in ORDER[: ORDER.index(room) + 1]:
                upwards.append(f"{PACKAGE.name}/{place}:{line} imports {other}, which is not below {room}")
    assert not upwards, "\n".join(["imports that point upwards:", *upwards])
