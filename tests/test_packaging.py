"""What is published says the same everywhere, and ``all`` is all."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import mergestream

ROOT = Path(__file__).parents[1]
FOR_DEVELOPERS = {"suites", "docs", "dev"}


@pytest.fixture
def project() -> Any:
    if sys.version_info < (3, 11):
        pytest.skip("Python reads TOML from 3.11 on")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_all_is_every_extra_that_a_user_can_want(project: Any) -> None:
    extras = project["optional-dependencies"]
    (everything,) = extras.pop("all")
    assert set(re.findall(r"\w+", everything.partition("[")[2])) == extras.keys() - FOR_DEVELOPERS


def test_an_extra_that_a_sentence_names_is_there(project: Any) -> None:
    named = {
        extra
        for path in [*(ROOT / "mergestream").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
        for group in re.findall(r"mergestream\[([\w,]+)\]", path.read_text())
        for extra in group.split(",")
    }
    assert named
    assert named <= project["optional-dependencies"].keys()


def test_one_version(project: Any) -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == mergestream.__version__ == citation["version"]


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_call_what_there_is(workflow: Any) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert ".ci/run" in commands or workflow.stem not in ("test", "release")
    assert {target for command in commands for target in re.findall(r"\bmake ([\w-]+)", command)} <= targets
