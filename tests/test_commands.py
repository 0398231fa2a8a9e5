"""A user's command: what it may be, how it is run, and which number counts."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from mergestream.commands import check_command, last_number, run_command
from mergestream.errors import MergestreamError, UsageError


def python(code: str, *arguments: str) -> str:
    return shlex.join([sys.executable, "-c", code, *arguments])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("epoch 3 accuracy: 0.75", 0.75),
        ("acc=.5 (v2)", 0.5),
        ("done in 0.5s, score -2.5e-1.", -0.25),
        ("took 0.5s", None),
        ("model v2, step-3b", None),
        ("", None),
    ],
)
def test_the_last_number_that_stands_by_itself(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_places_are_filled_once_and_no_shell_looks_at_them(tmp_path: Path) -> None:
    awkward = tmp_path / "{task}; echo $HOME"
    printed = run_command(python("import sys; print(sys.argv[1:])", "{model}", "{task}", "{other}"),
                          model=awkward, task="a b")  # fmt: skip
    assert printed.strip() == repr([str(awkward), "a b", "{other}"])


def test_a_failure_is_told_by_its_last_words_or_its_code() -> None:
    with pytest.raises(MergestreamError, match=r"failed: no such task$"):
        run_command(python("import sys; print('x', file=sys.stderr); sys.exit('no such task')"))
    with pytest.raises(MergestreamError, match=r"failed: it ended with code 3$"):
        run_command(python("raise SystemExit(3)"))
    with pytest.raises(MergestreamError, match="no-such-program of --evaluate cannot be run"):
        run_command("no-such-program {model}", model="m")


def test_standard_error_goes_on_to_the_user_where_it_is_wanted(capfd: pytest.CaptureFixture[str]) -> None:
    for show, seen in ((True, "halfway\n"), (False, "")):
        assert run_command(python("import sys; print('halfway', file=sys.stderr); print(1)"), show_errors=show) == "1\n"
        assert capfd.readouterr().err == seen


@pytest.mark.parametrize("template", ["python score.py", "'python {model}", ""])
def test_a_command_that_cannot_be_meant_is_wrong_usage(template: str) -> None:
    with pytest.raises(UsageError, match="--evaluate"):
        check_command(template)
