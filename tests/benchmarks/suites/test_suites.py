"""The offline suites through the door that is anybody's: by path and by name, limited, and in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suites import text, text_lora, vision, vision_lora
from benchmarks.suites.lora import LoRARecipe
from benchmarks.suites.trained import TrainedSuite
from mergestream.cli import main
from mergestream.errors import UsageError
from mergestream.evaluation.bench import run_parallel
from mergestream.evaluation.suites import open_suite

ROOT = Path(__file__).parents[3]
SUITES = ROOT / "benchmarks" / "suites"


@pytest.mark.parametrize("module", [text, vision])
def test_a_short_name_means_the_file_in_the_checkout(module: Any) -> None:
    by_name, by_path = open_suite(module.SUITE.name), open_suite(Path(module.__file__))
    assert isinstance(by_name, TrainedSuite) and isinstance(by_path, TrainedSuite)
    assert by_name.tasks == by_path.tasks == module.SUITE.tasks == tuple(task.name for task in module.TASKS[:8])
    assert by_name.test_limit == 500


@pytest.mark.parametrize(("module", "plain"), [(text_lora, text), (vision_lora, vision)])
def test_the_suites_of_adapters_differ_in_their_experts_alone(module: Any, plain: Any) -> None:
    by_name, by_path = open_suite(f"{plain.SUITE.name}-lora"), open_suite(Path(module.__file__))
    assert isinstance(by_name, TrainedSuite) and isinstance(by_path, TrainedSuite)
    assert by_name.recipe == by_path.recipe == LoRARecipe.like(plain.SUITE.recipe)
    assert (by_name.recipe.rank, by_name.recipe.learning_rate) == (16, 10 * plain.SUITE.recipe.learning_rate)
    assert by_name.recipe.steps(10**6) == plain.SUITE.recipe.steps(10**6)
    assert by_name.all_tasks is plain.TASKS and by_name.backbone is plain.SUITE.backbone
    assert by_name.data_of == plain.SUITE.name and by_name.tasks == plain.SUITE.tasks


def test_tasks_and_samples_are_limited_as_asked() -> None:
    suite = open_suite("vision", tasks=14, test_limit=20)
    assert isinstance(suite, TrainedSuite)
    assert suite.tasks == tuple(task.name for task in vision.TASKS[:14]) and suite.test_limit == 20
    for name, count, most in (("text", 9, 8), ("vision", 19, 18), ("text", 1, 8)):
        with pytest.raises(UsageError, match=f"the suite {name} has between 2 and {most} tasks, not {count}"):
            open_suite(name, tasks=count)


def described(*suites: Any) -> Any:
    return [(suite.name, suite.tasks, suite.test_limit, suite.recipe.samples) for suite in suites]


def test_they_survive_the_way_into_a_spawned_process() -> None:
    suite = open_suite(SUITES / "vision.py")
    chosen = open_suite(str(SUITES / "vision.py"), tasks=3, test_limit=7)
    (found,) = run_parallel(described, [(suite, chosen)], workers=2)
    assert found == [("vision", suite.tasks, 500, 2500), ("vision", suite.tasks[:3], 7, 2500)]


def test_the_path_works_from_anywhere(tmp_path: Path) -> None:
    """With nothing of the repository on Python's path but the package."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mergestream").symlink_to(ROOT / "mergestream")
    output = tmp_path / "a file"
    output.touch()
    command = [sys.executable, "-m", "mergestream", "bench", str(SUITES / "vision.py"), "-o", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "is a file; name a directory" in done.stderr, done.stderr


def test_a_wrong_method_or_output_is_told_before_any_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainedSuite, "prepare", lambda *_: pytest.fail("work was begun"))
    output = ["-o", str(tmp_path / "out")]
    assert main(["bench", "text", *output, "--methods", "average:colour=1"]) == 2
    assert main(["bench", "text", *output, "--methods", "opcm:alpha=2"]) == 2
    assert main(["bench", "text", "-o", __file__]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error"] * 3
    assert "colour" in lines[0] and "between 0 and 1" in lines[1] and "is a file" in lines[2]
