"""What the documentation shows is there: the sentences of errors are the program's, and the notebook runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]


def sentences(source: str) -> Iterator[str]:
    """The texts of a module, with … for what is filled in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def test_the_errors_that_are_explained_are_the_programs_own():
    ours = [text for path in (ROOT / "mergestream").rglob("*.py") for text in sentences(path.read_text())]
    explained = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert len(explained) > 15
    assert [quoted for quoted in explained if not any(quoted in text for text in ours)] == []


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "docs/digits.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
