"""Suites of your own."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from mergestream.cli import main
from mergestream.errors import MergestreamError, UsageError
from mergestream.evaluation.suites import open_suite


def test_a_python_suite_scores_data_below_a_head(tiny_suite: Path) -> None:
    suite = open_suite(tiny_suite)
    assert suite.tasks == ("red", "green", "blue")
    assert suite.accuracy(suite.expert("red"), "red") == 1.0
    assert suite.accuracy(suite.base(), "red") < 1.0


def test_a_suite_can_be_sent_to_another_process(tiny_suite: Path) -> None:
    suite = open_suite(tiny_suite, tasks=2)
    assert pickle.loads(pickle.dumps(suite)).tasks == suite.tasks == ("red", "green")


def test_mistakes_in_a_suite_file_are_told(tiny_suite: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    head = "from mergestream.evaluation.suites import CustomSuite\n"
    for arguments, told in (
        ("'a b', 'base', {'a': 'x', 'b': 'y'}, len", "is no valid name"),
        ("'n', 'base', {'a': 'x'}, len", "at least two tasks"),
    ):
        path.write_text(f"{head}SUITE = CustomSuite({arguments})\n")
        with pytest.raises(UsageError, match=rf"bad\.py: .*{told}"):
            open_suite(path)
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1")
    with pytest.raises(UsageError, match="defines no SUITE"):
        open_suite(empty)
    with pytest.raises(UsageError, match=r"there is no suite .*absent"):
        open_suite(tmp_path / "absent.py")


def test_mistakes_in_a_users_functions_are_one_sentence(tiny_suite: Path, tmp_path: Path) -> None:
    for text, told in (
        ("x = (", "SyntaxError"),
        ("import no_such_module", "no_such_module"),
        ("raise ValueError('broken')", "ValueError: broken"),
    ):
        path = tmp_path / "bad.py"
        path.write_text(text)
        with pytest.raises(UsageError, match=rf"bad\.py cannot be loaded: .*{told}"):
            open_suite(path)
    code = tiny_suite.read_text()
    for body, told in (("return inputs[:, :1]", "the task red cannot be scored: RuntimeError"),
                       ("return 1 / 0", "the task red cannot be scored: ZeroDivisionError")):  # fmt: skip
        tiny_suite.write_text(code.replace("    weights = load_file", f"    {body}\n    weights = load_file"))
        suite = open_suite(tiny_suite)
        with pytest.raises(MergestreamError, match=told):
            suite.accuracy(suite.base(), "red")
    tiny_suite.write_text(code + "SUITE = CustomSuite('tiny', 'base', EXPERTS, lambda model, task: 93.5)\n")
    suite = open_suite(tiny_suite)
    with pytest.raises(MergestreamError, match=r"is 93\.5, not between 0 and 1"):
        suite.accuracy(suite.base(), "red")


def test_data_without_its_tensors_is_one_sentence(tiny_suite: Path) -> None:
    (tiny_suite.parent / "data/red/test.safetensors").write_bytes(
        (tiny_suite.parent / "heads/red.safetensors").read_bytes()
    )
    suite = open_suite(tiny_suite)
    with pytest.raises(MergestreamError, match="the task red cannot be scored: KeyError: 'inputs'"):
        suite.accuracy(suite.base(), "red")


def test_a_suite_has_as_many_tasks_as_it_has(tiny_suite: Path) -> None:
    for count in (-1, 0, 1, 4):
        with pytest.raises(UsageError, match=f"between 2 and 3 tasks, not {count}"):
            open_suite(tiny_suite, tasks=count)


def test_a_missing_package_is_one_sentence(
    tiny_suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--methods", "average", "--orders", "1", "--workers", "1"]
    preparing = (
        "class Trained(CustomSuite):\n    def prepare(self, on_progress, workers):\n        import no_such_module\n"
    )
    tiny_suite.write_text(
        tiny_suite.read_text()
        .replace("SUITE = Custom", f"{preparing}\nSUITE = Trained")
        .replace("TrainedSuite(", "Trained(")
    )
    assert main(["bench", str(tiny_suite), "-o", str(tmp_path / "out"), *options]) == 1
    assert "the Python module no_such_module is not installed; pip install" in capsys.readouterr().err


def test_a_changed_score_function_is_another_evaluation(tiny_suite: Path) -> None:
    """Else scores would come from the cache although the code that makes them has changed."""
    beside = tiny_suite.with_name("helper.py")
    beside.write_text("FACTOR = 1\n")
    before = open_suite(tiny_suite).evaluation_key("red")
    assert open_suite(tiny_suite).evaluation_key("red") == before != open_suite(tiny_suite).evaluation_key("blue")
    beside.write_text("FACTOR = 2\n")
    assert open_suite(tiny_suite).evaluation_key("red") != before
