"""Tables: aligned as text, suppressed with ``--json``."""

from __future__ import annotations

import pytest

from mergestream.cli.printing import print_table, replying

PLAIN = "expert  norm\na          1\nlong      22\n"


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    print_table(("expert", "norm"), [("a", 1), ("long", 22)])
    return capsys.readouterr().out


def test_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys) == PLAIN


def test_json_suppresses_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with replying(as_json=True):
        assert printed(capsys) == ""
