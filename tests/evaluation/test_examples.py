"""The example of a suite of your own does what its text says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mergestream.evaluation.suites import open_suite

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_suite"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("examples") / "own_suite"
    shutil.copytree(EXAMPLE, directory, ignore=lambda folder, names: {"base", "experts", "data", "heads"} & set(names))
    subprocess.run([sys.executable, directory / "make_models.py"], check=True, capture_output=True)
    return directory


@pytest.mark.slow
def test_experts_are_better_than_the_base(example: Path) -> None:
    suite = open_suite(example / "suite.py")
    for task in suite.tasks:
        base, expert = (suite.accuracy(model, task) for model in (suite.base(), suite.expert(task)))
        assert expert > max(0.8, base)


@pytest.mark.slow
def test_the_examples_command_works(example: Path, tmp_path: Path, done: Callable[..., str]) -> None:
    options = ("--orders", 2, "--methods", "ledger,opcm,average", "-o", tmp_path / "out", "--workers", 1)
    done("bench", example / "suite.py", *options)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["summary"]["opcm"]["acc"]["count"] == 2
    found = {method: results["summary"][method]["acc"]["mean"] for method in ("ledger", "average")}
    base, experts = (sum(results[models].values()) / 3 for models in ("pretrained", "fine_tuned"))
    assert base < found["average"] < found["ledger"] < experts, "like the experts of real tasks"
