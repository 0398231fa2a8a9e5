"""The quick part of ``make torture``: the same few cases of each family, in a process of their own, as they fork."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.faults.families import FAMILIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or sys.version_info < (3, 11), reason="the shim is for Linux"),
]
QUICK = [family.name for family in FAMILIES if family.quick]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[dict[str, str]]]:
    log = tmp_path_factory.mktemp("quick") / "log"
    command: list[str | Path] = [sys.executable, "-m", "tests.faults.torture", "--quick", "--log", log]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    assert lines, done.stderr
    return {name: [line for line in lines if line["family"] == name] for name in QUICK}


@pytest.mark.parametrize("family", QUICK)
def test_nothing_is_damaged(family: str, results: Mapping[str, Sequence[dict[str, str]]], tmp_path: Path) -> None:
    assert results[family]
    assert [f"{case['case']}: {case['wrong']}" for case in results[family] if case["wrong"]] == []
