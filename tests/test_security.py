"""What SECURITY.md promises about the code: nothing that was read is ever executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mergestream
from tests.conftest import RunCommand

PACKAGE = Path(mergestream.__file__).parent
RUNS_USERS_CODE = {"commands.py": "subprocess.run", "evaluation/suites.py": "spec.loader.exec_module"}
"""The two places that run what the user has named: ``--evaluate``, and suites"""
FORBIDDEN = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "os.execv",
    "pickle.load",
    "pickle.loads",
    "yaml.load",
    "yaml.unsafe_load",
    "runpy.run_path",
    "tarfile.open",
    "shutil.unpack_archive",
}
STARTS = ("subprocess.", "os.spawn", "os.exec", "asyncio.create_subprocess")


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Every call in the package: its file, what is called, and how."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                yield str(path.relative_to(PACKAGE)), ast.unparse(node.func), node


def keywords(call: ast.Call) -> dict[str | None, str]:
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


def test_nothing_that_was_read_can_be_executed() -> None:
    found = [(file, name) for file, name, _ in calls() if name in FORBIDDEN]
    assert found == []


def test_what_the_user_has_named_is_run_in_two_places_and_without_a_shell() -> None:
    started = [(f, n, c) for f, n, c in calls() if n.startswith(STARTS) or n.endswith("exec_module")]
    assert {(file, name) for file, name, _ in started} == set(RUNS_USERS_CODE.items())
    assert not [file for file, _, call in calls() if keywords(call).get("shell", "False") != "False"]


def test_remote_code_is_never_trusted_and_pickles_are_never_executed() -> None:
    for file, name, call in calls():
        assert keywords(call).get("trust_remote_code", "False") == "False", file
        assert name != "torch.load" or keywords(call)["weights_only"] == "True", file
        assert name not in ("numpy.load", "np.load") or keywords(call)["allow_pickle"] == "False", file


@pytest.mark.parametrize(
    ("command", "said"),
    [("add", "run CMD on the merged model"), ("bench", "its code is executed")],
)
def test_the_help_says_what_is_run(command: str, said: str, mergestream: RunCommand) -> None:
    assert said in " ".join(mergestream(command, "--help").out.split())


def test_a_name_never_becomes_another_word_of_a_command(tmp_path: Path) -> None:
    from mergestream.commands import run_command

    hostile = tmp_path / "$(touch hacked); 'x' {task}"
    printed = run_command("echo {model}", model=hostile)
    assert printed == f"{hostile}\n"
    assert list(tmp_path.iterdir()) == []
