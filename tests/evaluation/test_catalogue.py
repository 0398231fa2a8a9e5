"""Suites by name and by file: where they are found, what can be chosen of them, how they reach other processes."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mergestream
from benchmarks.suites.clip_suite import ClipSuite
from mergestream.errors import MergestreamError, UsageError
from mergestream.evaluation import suites
from mergestream.evaluation.bench import run_parallel
from mergestream.evaluation.suites import open_suite

PACKAGE = Path(mergestream.__file__).parent


def facts(suite: Any, task: Any) -> Any:
    """What a worker process finds in the suite that it was sent."""
    return suite.tasks, suite.accuracy(suite.expert(task), task)


def test_a_suite_of_a_file_survives_the_way_into_a_spawned_process(tiny_suite: Path) -> None:
    suite = open_suite(tiny_suite, tasks=2)
    assert list(run_parallel(facts, [(suite, "red")], workers=2)) == [(("red", "green"), 1.0)]


OWN_CLASS = """
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from neighbour import ACCURACY

from mergestream.evaluation.suites import Suite


@dataclass
class Own(Suite):
    name: str = "own"
    model_name: str = "none"
    tasks: tuple[str, ...] = ("red", "green")

    def base(self) -> Path:
        return Path("base")

    def expert(self, task: str) -> Path:
        return Path(task)

    def accuracy(self, model: Path, task: str) -> float:
        from neighbour import later

        return later(ACCURACY)

    def evaluation_key(self, task: str) -> str:
        return task


SUITE = Own()
"""


@pytest.mark.parametrize("inside_a_package", [False, True])
def test_a_suite_may_import_its_neighbours_here_and_in_a_worker(
    inside_a_package: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, code = f"neighbour_{inside_a_package}".lower(), OWN_CLASS
    if inside_a_package:
        (tmp_path / "__init__.py").touch()
        code = code.replace("neighbour", f"{tmp_path.name}.{name}")
    else:
        code = code.replace("neighbour", name)
    (tmp_path / f"{name}.py").write_text("ACCURACY = 0.25\n\n\ndef later(value):\n    return value\n")
    (tmp_path / "own.py").write_text(code)
    monkeypatch.setattr(sys, "path", list(sys.path))
    suite = open_suite(tmp_path / "own.py")
    assert list(run_parallel(facts, [(suite, "red")], workers=2)) == [(("red", "green"), 0.25)]


def test_what_a_suite_cannot_honour_is_refused(
    tiny_suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "other.py").write_text("ACCURACY, later = 1.0, float\n")
    own = tmp_path / "own.py"
    own.write_text(OWN_CLASS.replace("neighbour", "other"))
    for name, choice, told in (
        (str(tiny_suite), {"test_limit": 9}, "leave --test-limit out"),
        (str(own), {"tasks": 2}, "leave --tasks out"),
        (str(own), {"test_limit": 9}, "leave --test-limit out"),
        ("clip", {"tasks": 21}, "between 2 and 20 tasks, not 21"),
    ):
        with pytest.raises(UsageError, match=told):
            open_suite(name, **choice)


def test_clip_is_limited_as_asked() -> None:
    suite = open_suite("clip-vit-l-14", tasks=14, test_limit=7)
    assert isinstance(suite, ClipSuite) and len(suite.tasks) == 14
    assert (suite.model_name, suite.test_limit) == ("ViT-L/14", 7)
    assert len(open_suite("clip").tasks) == 8
    assert open_suite("clip-vit-b-16").model_name == "ViT-B/16"


def test_an_unknown_name_is_one_sentence_that_says_where_suites_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="there is no suite imagenet: name a Python file"):
        open_suite("imagenet")
    monkeypatch.setattr(suites, "CHECKOUT", tmp_path)
    with pytest.raises(UsageError, match=r"there is no suite vision: .* a file of benchmarks/suites") as told:
        open_suite("vision")
    assert "\n" not in str(told.value)


def test_the_package_alone_has_no_suites_and_says_where_they_are(tmp_path: Path) -> None:
    """As a wheel installs it: nothing of the repository beside it."""
    shutil.copytree(PACKAGE, tmp_path / "mergestream")
    command = [sys.executable, "-m", "mergestream", "bench", "text", "-o", "out"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: there is no suite text: ") and "a file of benchmarks/suites" in line


def test_the_package_holds_no_suite_data() -> None:
    """Fonts, packages to fetch and the paper's numbers are the repository's, not the users'."""
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in files} <= {".py", ".typed", ".js", ".css", ".html", ".md", ".json"}
    assert [path.name for path in files if path.suffix == ".json"] == ["known_architectures.json"]
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    assert not names & {"fetch", "fonts", "scripts", "vision", "text", "backbones", "training", "demo"}


def test_the_package_imports_nothing_of_the_repository_beside_it() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {module.split(".")[0] for module in modules} & {"benchmarks", "tests"}, path


def test_evaluation_knows_nothing_of_the_command_line() -> None:
    for path in (PACKAGE / "evaluation").rglob("*.py"):
        assert "mergestream.cli" not in path.read_text("utf-8"), path


def test_the_command_is_described_without_heavy_imports() -> None:
    code = "import sys, mergestream.cli.bench; print({'torch', 'numpy', 'rich', 'matplotlib'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_suite_that_cannot_be_imported_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no suite "):
        open_suite(tmp_path / "absent.py")
    (tmp_path / "own.py").write_text("SUITE = 3\n")
    with pytest.raises(MergestreamError, match="defines no SUITE"):
        open_suite(tmp_path / "own.py")
