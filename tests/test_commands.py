"""The user's --evaluate command: checks, placeholders, failures, and the score."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import time
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
        ("epoch 3: 1e999", math.inf),
        ("epoch 3: -Infinity", -math.inf),
        ("7".join(["", *"7" * 5000]), math.inf),
    ],
)
def test_the_last_standalone_number_is_found(text: str, number: float | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize("text", ["epoch 3: nan", "NaN", "0.5 -NAN."])
def test_nan_is_found(text: str) -> None:
    assert math.isnan(last_number(text) or 0)


def test_placeholders_are_filled_once_without_a_shell(tmp_path: Path) -> None:
    awkward = tmp_path / "{task}; echo $HOME"
    printed = run_command(python("import sys; print(sys.argv[1:])", "{model}", "{task}", "{other}"),
                          model=awkward, task="a b")  # fmt: skip
    assert printed.strip() == repr([str(awkward), "a b", "{other}"])


def test_a_failure_shows_the_last_line_or_the_exit_code() -> None:
    with pytest.raises(MergestreamError, match=r"failed: no such task\b"):
        run_command(python("import sys; print('x', file=sys.stderr); sys.exit('no such task')"))
    with pytest.raises(MergestreamError, match=r"failed: exit code 3\b"):
        run_command(python("raise SystemExit(3)"))
    with pytest.raises(MergestreamError, match="no-such-program cannot be run"):
        run_command("no-such-program {model}", model="m")


def test_standard_error_is_shown_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    for show, seen in ((True, "halfway\n"), (False, "")):
        assert run_command(python("import sys; print('halfway', file=sys.stderr); print(1)"), show_errors=show) == "1\n"
        assert capfd.readouterr().err == seen


def test_background_processes_are_not_waited_for() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
    started = time.monotonic()
    left = int(run_command(python(code)))
    os.kill(left, signal.SIGKILL)  # it is still there
    assert time.monotonic() - started < 50


def test_the_end_of_long_output_is_kept() -> None:
    printed = run_command(python("print('7 ' * 3_000_000); print(0.5)"))
    assert len(printed) <= 1 << 20 and last_number(printed) == 0.5
    assert last_number(run_command(python(r"import os; os.write(1, b'\xff\x00 0.5')"))) == 0.5


@pytest.mark.parametrize("template", ["python score.py", "'python {model}", ""])
def test_an_invalid_command_is_wrong_usage(template: str) -> None:
    with pytest.raises(UsageError, match="--evaluate"):
        check_command(template)
