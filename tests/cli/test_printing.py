"""Tables: coloured on a terminal, plain elsewhere."""

from __future__ import annotations

import sys

import pytest

from mergestream.cli.printing import print_table, replying

PLAIN = "expert  norm\na          1\nlong      22\n"


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    print_table(("expert", "norm"), [("a", 1), ("long", 22)])
    return capsys.readouterr().out


def test_a_pipe_gets_no_colours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert printed(capsys) == PLAIN


def test_a_terminal_gets_colours_and_the_same_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = printed(capsys)
    assert shown.splitlines()[0] == "\x1b[1mexpert  norm\x1b[0m"
    assert shown.replace("\x1b[1m", "").replace("\x1b[36m", "").replace("\x1b[0m", "") == PLAIN


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_switched_off(
    variable: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv(variable, value)
    assert printed(capsys) == PLAIN


def test_json_suppresses_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with replying(as_json=True):
        assert printed(capsys) == ""
