"""Imports point downwards only, and the outer folders use the public API."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mergestream

PACKAGE = Path(mergestream.__file__).parent
ORDER = [
    *("errors", "escaping", "sizes", "digest", "files", "schema", "storage", "progress", "interrupts"),
    *("registry", "commands"),
    *("engine", "checkpoints", "algebra", "base", "experts", "methods", "ledger", "inputs", "merging"),
    *("store", "export", "routed", "hub", "report", "tracking", "mergekit"),
    *("evaluation", "testing", "cli", "__init__", "__main__"),
]
"""Files and folders of the package, the lowest first; within a folder every import is allowed"""

OUTER = {
    "mergekit": set[str](),
    "evaluation": {"report"},
    "tracking": set[str](),
}
"""What the outer folders still import beside the public names and UTILITIES; remove an entry once nothing needs it"""
UTILITIES = {"errors", "escaping", "sizes", "digest", "files", "progress", "registry", "commands"}
"""Small top-level modules that every folder may import"""


FACADE = "store/store.py"
"""`Store` may import upwards: its methods call what is made of a store"""


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Every import of the package in a file, as a name below ``mergestream``, with its line.

    Lazy imports and imports for types count.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == PACKAGE.name and rest != "__version__":
                assert isinstance(node, ast.Import | ast.ImportFrom)
                yield rest or "__init__", node.lineno


def folder_of(name: str) -> str:
    """The file or folder that an imported name belongs to."""
    home = mergestream._HOMES.get(name)
    return (home.partition(".")[2] if home else name).partition(".")[0]


def test_imports_point_downwards_only() -> None:
    upwards = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        folder = place.with_suffix("").parts[0]
        assert folder in ORDER, f"{place}: {folder} has no place in the order"
        for name, line in imported(path) if str(place) != FACADE else ():
            if folder_of(name) not in ORDER[: ORDER.index(folder) + 1]:
                upwards.append(f"{PACKAGE.name}/{place}:{line} imports {name}, which is not below {folder}")
    assert not upwards, "\n".join(["imports that point upwards:", *upwards])


def test_outer_folders_import_the_public_api_only() -> None:
    for folder, exceptions in OUTER.items():
        allowed = {*mergestream._HOMES, *UTILITIES, folder}
        found = {
            name.partition(".")[0]: f"{PACKAGE.name}/{path.relative_to(PACKAGE)}:{line} imports {name}"
            for path in sorted(PACKAGE.rglob("*.py"))
            if path.relative_to(PACKAGE).with_suffix("").parts[0] == folder
            for name, line in imported(path)
        }
        private = {first: where for first, where in found.items() if first not in allowed}
        message = "\n".join([f"{folder} imports more or less than OUTER says:", *private.values()])
        assert private.keys() == exceptions, message
