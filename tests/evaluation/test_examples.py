"""The example of a suite of your own does what its text says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mergestream.evaluation.suites.catalogue import open_suite

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_suite"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("examples") / "own_suite"
    shutil.copytree(EXAMPLE, directory, ignore=lambda folder, names: {"base", "experts", "data", "heads"} & set(names))
    subprocess.run([sys.executable, directory / "make_models.py"], check=True, capture_output=True)
    return directory


@pytest.mark.slow
def test_yaml_python_and_command_agree(example):
    suites = [
        open_suite(str(example / "suite.yaml")),
        open_suite(str(example / "suite.py")),
        open_suite(str(example / "suite.py"), evaluate=f"{sys.executable} {example / 'score.py'} {{model}} {{task}}"),
    ]
    for task in suites[0].tasks:
        base = {suite.accuracy(suite.base(), task) for suite in suites}
        expert = {suite.accuracy(suite.expert(task), task) for suite in suites}
        assert len(base) == len(expert) == 1
        assert expert.pop() > max(0.8, base.pop())


@pytest.mark.slow
def test_the_examples_command_works(example, tmp_path):
    command = [sys.executable, "-m", "mergestream", "bench", str(example / "suite.yaml"), "--orders", "2"]
    command += ["--methods", "opcm,average", "-o", str(tmp_path / "out"), "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "results.json").read_text())["summary"]
    assert summary["opcm"]["acc"]["count"] == 2
