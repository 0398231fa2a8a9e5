"""Shell completion with argcomplete."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mergestream ex", {"export"}),
        ("mergestream export store merged --read", {"--readout"}),
        ("mergestream export store merged --format lo", {"lora", "loras"}),
        ("mergestream add sto", {"store/", "stories/"}),
    ],
)
def test_the_shell_completes_words(line: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "stories").mkdir()
    answer = tmp_path / "answer"
    environment = {
        **os.environ,
        **{"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)},
        **{"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SUPPRESS_SPACE": "1"},
    }
    code = "import sys; from mergestream.cli import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, stdout=subprocess.PIPE)
    assert set(answer.read_text().split()) == expected
