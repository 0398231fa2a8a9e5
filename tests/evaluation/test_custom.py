"""Suites of your own: Python, YAML, and a command that prints the accuracy."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from mergestream.cli import main
from mergestream.errors import MergestreamError, UsageError
from mergestream.evaluation.suites import open_suite, read_accuracy

YAML = """
name: tiny
base: base
experts: {red: experts/red, blue: experts/blue}
score: suite.py:accuracy
"""


def with_command(tiny_suite: Path, command: str) -> Path:
    """The suite in YAML, scored by a command."""
    path = tiny_suite.with_name("command.yaml")
    path.write_text(YAML.replace("score: suite.py:accuracy", f"evaluate: {json.dumps(command)}"))
    return path


def test_a_python_suite_scores_data_below_a_head(tiny_suite: Path) -> None:
    suite = open_suite(tiny_suite)
    assert suite.tasks == ("red", "green", "blue")
    assert suite.accuracy(suite.expert("red"), "red") == 1.0
    assert suite.accuracy(suite.base(), "red") < 1.0


def test_yaml_says_the_same(tiny_suite: Path) -> None:
    path = tiny_suite.with_name("suite.yaml")
    path.write_text(YAML)
    suite, python = open_suite(path), open_suite(tiny_suite)
    assert suite.tasks == ("red", "blue")
    for task in suite.tasks:
        assert suite.accuracy(suite.base(), task) == python.accuracy(python.base(), task)


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
    assert suite.accuracy(suite.base(), "blue") == 0.4


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
    for text in (
        "base: x",
        "experts: {a: x, b: y}\nbase: x\nevaluate: cmd {model}\ncolour: red",
        "- 1",
        "a: [",
        "base: b\nexperts: {a: x}\nevaluate: cmd {model}",
        "base: b\nexperts: {a: x, b: y}",
        "base: b\nexperts: {a: x, b: y}\ntasks: {}\nevaluate: cmd {model}",
    ):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(UsageError, match=r"bad\.yaml"):
            open_suite(path)
    for content, told in (
        (b"base: \xff\nexperts: {}", "not valid UTF-8"),
        (b"base: b\nexperts: " + b"[" * 3000 + b"]" * 3000, "nested too deeply"),
        (b"base: 5\nexperts: {a: x, b: y}", "5 is not a path"),
        (b"base: b\nexperts: {a: [x], b: y}", "is not a path"),
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=rf"bad\.yaml.*{told}"):
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
    yaml = tiny_suite.with_name("suite.yaml")
    yaml.write_text(YAML.replace("suite.py:accuracy", "absent.py:accuracy"))
    with pytest.raises(UsageError, match=r"there is no file .*absent\.py"):
        open_suite(yaml)
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


@pytest.mark.parametrize("module", ["yaml", "matplotlib"])
def test_a_missing_package_is_one_sentence(
    module: str,
    tiny_suite: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tiny_suite.with_name("suite.yaml")
    path.write_text(YAML)
    options = ["--methods", "average", "--orders", "1", "--workers", "1"]
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "mergestream.evaluation.tables", raising=False)
    assert main(["bench", str(path), "-o", str(tmp_path / "out"), *options]) == 1
    assert f"bench needs the module {module}" in capsys.readouterr().err


def test_a_changed_score_function_is_another_evaluation(tiny_suite: Path) -> None:
    """Else scores would come from the cache although the code that makes them has changed."""
    path = tiny_suite.with_name("suite.yaml")
    path.write_text(YAML)
    before = open_suite(path).evaluation_key("red")
    assert open_suite(path).evaluation_key("red") == before != open_suite(path).evaluation_key("blue")
    tiny_suite.write_text(tiny_suite.read_text().replace("torch.tanh", "torch.relu"))
    assert open_suite(path).evaluation_key("red") != before
