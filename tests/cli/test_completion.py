"""Shell completion with argcomplete."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mergestream import Store
from tests.conftest import Toys


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, toys: Toys) -> Path:
    """A working directory that contains a store with two experts."""
    place = tmp_path_factory.mktemp("home")
    store = Store.create(place / "store", toys.base)
    store.add(toys.experts[0], name="legal")
    store.add(toys.experts[1], name="medical")
    (place / "stories").mkdir()
    return place


def completions(place: Path, line: str) -> list[str]:
    answer = place / "answer"
    answer.unlink(missing_ok=True)
    environment = {
        **os.environ,
        **{"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)},
        **{"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SUPPRESS_SPACE": "1"},
    }
    code = "import sys; from mergestream.cli import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=place, check=True, stdout=subprocess.PIPE)
    return answer.read_text().split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mergestream ex", {"export"}),
        ("mergestream export store merged --read", {"--readout"}),
        ("mergestream export store merged --readout ", {"agree", "tsv", "expert:legal", "expert:medical"}),
        ("mergestream export store merged --format lo", {"lora", "loras"}),
        ("mergestream export store merged --without legal,", {"legal,medical"}),
        ("mergestream export nowhere merged --task ", set()),
        ("mergestream remove store ", {"legal", "medical"}),
        ("mergestream add sto", {"store/", "stories/"}),
        ("mergestream init new --base b --method opcm --set pro", {"projection=reference", "projection=block"}),
        ("mergestream init new --base b --method task_a", {"task_arithmetic"}),
    ],
)
def test_the_shell_completes_words(line: str, expected: set[str], place: Path) -> None:
    answer = set(completions(place, line))
    assert expected <= answer
    assert answer or not expected
