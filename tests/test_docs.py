"""What the documentation shows is there: the sentences of errors are the program's, and the notebook runs."""

from __future__ import annotations

import ast
import re
import warnings
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
    explained = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/reference/errors.md").read_text(), re.MULTILINE)
    assert len(explained) > 15
    assert [quoted for quoted in explained if not any(quoted in text for text in ours)] == []


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "docs/tutorials/digits.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()


def test_the_tour_in_python_runs(tmp_path, monkeypatch):
    """Every block in turn; a line that ends in a comment <…> shows what its value says of itself, … for anything."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    page = (ROOT / "docs/tutorials/python.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = 0
    with warnings.catch_warnings():
        for block in blocks:
            exec(block, names)
            for line, told in re.findall(r"^(\w+)  # (<.*>)$", block, re.MULTILINE):
                assert re.fullmatch(re.escape(told).replace("…", ".*"), repr(names[line]))
                shown += 1
    assert len(blocks) > 8 and shown == 2
    assert {path.name for path in tmp_path.iterdir()} >= {"store", "merged", "legal-again", "both"}
