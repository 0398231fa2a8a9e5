"""Suites of your own: Python, YAML, and a command that prints the accuracy."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from mergestream.cli import main
from mergestream.errors import MergestreamError, UsageError
from mergestream.evaluation.suites import open_suite, read_accuracy


def with_command(tiny_suite: Path, command: str) -> Path:
    """The suite, scored by a command."""
    path = tiny_suite.with_name("command.py")
    path.write_text(tiny_suite.read_text().replace("EXPERTS, accuracy)", f"EXPERTS, evaluate={command!r})"))
    return path


def test_a_python_suite_scores_data_below_a_head(tiny_suite: Path) -> None:
    suite = open_suite(tiny_suite)
    assert suite.tasks == ("red", "green", "blue")
    assert suite.accuracy(suite.expert("red"), "red") == 1.0
    assert suite.accuracy(suite.base(), "red") < 1.0


def test_a_suite_can_be_sent_to_another_process(tiny_suite: Path) -> None:
    suite = open_suite(tiny_suite, tasks=2)
    assert pickle.loads(pickle.dumps(suite)).tasks == suite.tasks == ("red", "green")


def test_a_command_scores_a_model(tiny_suite: Path) -> None:
    script = tiny_suite.with_name("score.py")
    script.write_text(
        "import sys, pathlib\nassert pathlib.Path(sys.argv[1]).is_dir()\nprint('acc:', len(sys.argv[2]) / 10)"
    )
    suite = open_suite(with_command(tiny_suite, f"{sys.executable} {script} {{model}} {{task}}"))
    assert suite.accuracy(suite.base(), "red") == 0.3
    assert suite.accuracy(suite.base(), "green") == 0.5


def test_a_command_that_fails_is_one_sentence(tiny_suite: Path) -> None:
    command = f"{sys.executable} -c 'raise SystemExit(\"no such task\")' {{model}}"
    suite = open_suite(with_command(tiny_suite, command))
    with pytest.raises(MergestreamError, match="failed: no such task"):
        suite.accuracy(suite.base(), "red")
    with pytest.raises(MergestreamError, match="cannot be run"):
        open_suite(with_command(tiny_suite, "no-such-command {model}")).accuracy(suite.base(), "red")


@pytest.mark.parametrize(
    ("output", "value"),
    [("0.25", 0.25), ("loading\naccuracy = 0.5\n", 0.5), ('{"red": 0.75, "blue": 1}', 0.75), ("1", 1.0)],
)
def test_the_last_line_holds_the_accuracy(output: str, value: float) -> None:
    assert read_accuracy(output, "red", "cmd") == value


@pytest.mark.parametrize(
    "output",
    [
        *("", "done", "93.5", '{"blue": 0.5}', "null", "-0.1", "nan", "NaN", "1e999", "Infinity", "true", "[0.5]"),
        *('{"red": true}', '{"red": {"red": 0.5}}', "[" * 100_000, "1" * 5000, "9" * 400),
    ],
)
def test_anything_else_is_refused(output: Any) -> None:
    with pytest.raises(MergestreamError, match="between 0 and 1"):
        read_accuracy(output, "red", "cmd")


def test_mistakes_in_a_suite_file_are_told(tiny_suite: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    head = "from mergestream.evaluation.suites import CustomSuite\n"
    for arguments, told in (
        ("'a b', 'base', {'a': 'x', 'b': 'y'}, evaluate='cmd {model}'", "is no valid name"),
        ("'n', 'base', {'a': 'x'}, evaluate='cmd {model}'", "at least two tasks"),
        ("'n', 'base', {'a': 'x', 'b': 'y'}", "give the suite a score function"),
        ("'n', 'base', {'a': 'x', 'b': 'y'}, len, 'cmd {model}'", "give the suite a score function"),
    ):
        path.write_text(f"{head}SUITE = CustomSuite({arguments})\n")
        with pytest.raises(UsageError, match=rf"bad\.py: .*{told}"):
            open_suite(path)
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1")
    with pytest.raises(UsageError, match="defines no SUITE"):
        open_suite(empty)
    with pytest.raises(UsageError, match="there is no suite file"):
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


@pytest.mark.parametrize("command", ["python score.py", "'python {model}", ""])
def test_a_command_that_cannot_score_a_model_is_wrong_usage(command: str, tiny_suite: Path) -> None:
    with pytest.raises(UsageError, match="--evaluate"):
        open_suite(with_command(tiny_suite, command))


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
    assert "bench needs the module no_such_module" in capsys.readouterr().err


def test_a_changed_score_function_is_another_evaluation(tiny_suite: Path) -> None:
    """Else scores would come from the cache although the code that makes them has changed."""
    beside = tiny_suite.with_name("helper.py")
    beside.write_text("FACTOR = 1\n")
    before = open_suite(tiny_suite).evaluation_key("red")
    assert open_suite(tiny_suite).evaluation_key("red") == before != open_suite(tiny_suite).evaluation_key("blue")
    beside.write_text("FACTOR = 2\n")
    assert open_suite(tiny_suite).evaluation_key("red") != before
