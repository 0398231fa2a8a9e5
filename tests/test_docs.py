"""The documentation is true: its commands run, its options and pages exist, its errors are the program's own."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from mergestream.cli import main
from mergestream.ledger.readouts import READOUTS
from mergestream.methods import METHODS
from tests.conftest import RunCommand
from tests.test_imports import ORDER

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_the_readme_fits_on_few_screens() -> None:
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) < 120
    assert [line for line in lines if len(line) > 120] == []
    assert f"| number of methods | {len(METHODS)}, {len(set(READOUTS) - {'plain'})} readouts |" in README.read_text(
        "utf-8"
    )


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the shell examples of the README were run, exactly as pasted."""
    place = tmp_path_factory.mktemp("checkout")
    programs = place / "bin"
    programs.mkdir()
    starts = {"python": "", "mergestream": '-c "from mergestream.cli import main; raise SystemExit(main())"'}
    for name, start in starts.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {start} "$@"\n')
        (programs / name).chmod(0o755)
    shutil.copytree(ROOT / "examples", place / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    shell = next(block for block in blocks(README, "shell") if "make_models" in block)
    assert len(shell.splitlines()) == 5
    subprocess.run(["bash", "-e", "-c", shell], cwd=place, env=environment, check=True, capture_output=True)
    return place / "examples" / "own_suite"


@pytest.mark.slow
def test_the_examples_of_the_readme_run_as_pasted(tried: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (tried / "merged" / "model.safetensors").exists()
    monkeypatch.chdir(tried)
    exec(blocks(README, "python")[0], {})
    assert (tried / "merged-2" / "model.safetensors").exists()
    assert (tried / "ring-again" / "model.safetensors").exists()


def shape(text: str) -> str:
    """A text without its numbers, digests and columns."""
    return " ".join(re.sub(r"\b(?:[0-9a-f]{12}|\d[\d.:T+-]*)\b", "#", text).split())


@pytest.mark.slow
def test_the_first_merge_prints_what_the_page_shows(
    tried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mergestream: RunCommand
) -> None:
    """Compare everything except numbers; … stands for anything."""
    for name in ("base", "experts"):
        shutil.copytree(tried / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    console = "".join(blocks(ROOT / "docs/tutorials/first-merge.md", "console"))
    runs = re.findall(r"^\$ mergestream (.*)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE)
    assert len(runs) > 8
    for command, expected in runs:
        printed = shape(mergestream(*shlex.split(command)).out)
        assert re.fullmatch(re.escape(shape(expected)).replace("…", ".*"), printed), f"{command}: {printed}"


def test_the_picture_is_what_its_script_draws(tmp_path: Path) -> None:
    copy = tmp_path / "site" / "picture.py"
    copy.parent.mkdir()
    shutil.copy(ROOT / "docs/site/picture.py", copy)
    subprocess.run([sys.executable, copy], check=True)
    assert (tmp_path / "idea.svg").read_bytes() == (ROOT / "docs/idea.svg").read_bytes()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(page: Any) -> None:
    targets = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every mergestream command in the code blocks of a page."""
    text = page.read_text("utf-8")
    for block in re.findall(r"^```[^\n]*\n(.*?)^```|((?:^    [^\n]*\n)+)", text, re.MULTILINE | re.DOTALL):
        for line in "".join(block).replace("\\\n", " ").splitlines():
            if found := re.match(r"\s*(?:\$ |- run: )?mergestream ([a-z].*)", line):
                lexer = shlex.shlex(found[1], posix=True, punctuation_chars="|>&;")
                lexer.whitespace_split = True
                yield list(takewhile(lambda word: word[0] not in "|>&;", lexer))


@cache
def options(command: str) -> set[str]:
    """The options that a command lists in its help."""
    output = StringIO()
    with redirect_stdout(output), pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert not end.value.code, f"there is no command {command}"
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", output.getvalue()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page: Any) -> None:
    for command, *rest in commands(page):
        used = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        assert used <= options(command), (command, rest)


def sentences(source: str) -> Iterator[str]:
    """The texts of a module, with … for what is filled in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def test_the_errors_that_are_explained_are_the_programs_own() -> None:
    ours = [text for path in (ROOT / "mergestream").rglob("*.py") for text in sentences(path.read_text())]
    explained = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/reference/errors.md").read_text(), re.MULTILINE)
    assert len(explained) > 15
    assert [quoted for quoted in explained if not any(quoted in text for text in ours)] == []


def test_pages_that_the_code_names_exist() -> None:
    """Code names a page as ``docs/how-to/heads.md``, or ``docs: heads.md`` for short."""
    names = {path.name for path in PAGES}
    for path in [*(ROOT / "mergestream").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        source = path.read_text("utf-8")
        assert [name for name in re.findall(r"docs: ([\w-]+\.md)", source) if name not in names] == [], path
        named = re.findall(r"(?<![\w/])docs/[\w/-]+\.md", source)
        assert [name for name in named if not (ROOT / name).exists()] == [], path


def test_the_architecture_names_every_folder_in_the_order_of_imports() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text("utf-8")
    table = page.partition("## Folders")[2].partition("##")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    listed = [re.sub(r"\.py$|/$", "", name) for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert listed == [name for name in ORDER if not name.startswith("__")]


@pytest.mark.parametrize("name", ["docs/explanation/architecture.md", "docs/how-to/extending.md", "CONTRIBUTING.md"])
def test_source_files_that_a_page_names_exist(name: str) -> None:
    named = re.findall(r"`([a-z_/]+(?:\.py|/))`", (ROOT / name).read_text("utf-8"))
    assert [path for path in named if not any((top / path).exists() for top in (ROOT, ROOT / "mergestream"))] == []


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "docs/tutorials/digits.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code"), "every cell was run"


def test_the_tour_in_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every block in turn. A line that ends in a comment <…> shows the repr of its value, with … for anything."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    tour = blocks(ROOT / "docs/tutorials/python.md", "python")
    checked = 0
    with warnings.catch_warnings():
        for block in tour:
            exec(block, names)
            for name, expected in re.findall(r"^(\w+)  # (<.*>)$", block, re.MULTILINE):
                assert re.fullmatch(re.escape(expected).replace("…", ".*"), repr(names[name]))
                checked += 1
    assert len(tour) > 8 and checked == 2
    assert {path.name for path in tmp_path.iterdir()} >= {"store", "merged", "legal-again", "both"}
