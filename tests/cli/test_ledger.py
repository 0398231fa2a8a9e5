"""Output for a ledger: the shares held, and no scale, which only a readout has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Toys


@pytest.fixture
def ledger(tmp_path: Path, toys: Toys, done: Callable[..., str]) -> Path:
    done("init", tmp_path / "ledger", "--base", toys.base, "--method", "ledger")
    done("add", tmp_path / "ledger", *toys.experts[:2], "--quiet")
    return tmp_path / "ledger"


def test_add_prints_the_share_held(ledger: Path, toys: Toys, done: Callable[..., str]) -> None:
    printed = done("add", ledger, toys.experts[2])
    assert re.fullmatch(r"step 3: expert-3  ‖Δ‖ [\d.]+  held \d+\.\d%  [\d.]+ s\n", printed)
    (entry,) = json.loads(done("add", ledger, toys.experts[3], "--json"))
    assert entry["held"] == entry["kept"] and entry["lambda"] is None


def test_log_prints_the_share_held_now(ledger: Path, done: Callable[..., str]) -> None:
    log = json.loads(done("log", ledger, "--json"))
    assert [entry["name"] for entry in log] == ["expert-1", "expert-2"]
    assert all(0 < entry["held"] < 1 and entry["lambda"] is None and entry["cut"] == 8 for entry in log)
    headings, *rows = done("log", ledger).splitlines()
    assert headings.split() == ["expert", "added", "digest", "step", "‖Δ‖", "held", "slots"]
    assert [row.split()[-2:] for row in rows] == [[f"{entry['held']:.1%}", "8"] for entry in log]


def test_status_prints_slots_and_budget(ledger: Path, done: Callable[..., str]) -> None:
    status = json.loads(done("status", ledger, "--json"))
    taken = sum(path.stat().st_size for path in (ledger / "steps").rglob("*") if path.is_file())
    assert status["ledger"] == {"room_for": 8, "bytes": taken, "inputs_bytes": 0, "budget": 1.0}
    assert status["lambda"] is None and status["distance"] is None
    text = done("status", ledger)
    assert "2 experts in 8 slots" in text and "budget 1" in text and "λ" not in text


def test_an_empty_ledger_has_a_status_and_a_log(tmp_path: Path, toys: Toys, done: Callable[..., str]) -> None:
    done("init", tmp_path / "store", "--base", toys.base, "--method", "ledger")
    assert json.loads(done("status", tmp_path / "store", "--json"))["ledger"]["room_for"] == 0
    assert json.loads(done("log", tmp_path / "store", "--json")) == []
    assert "no experts yet" in done("log", tmp_path / "store")


def test_other_methods_have_no_ledger_fields(tmp_path: Path, toys: Toys, done: Callable[..., str]) -> None:
    done("init", tmp_path / "store", "--base", toys.base, "--alpha", 0.5)
    done("add", tmp_path / "store", toys.experts[0])
    assert json.loads(done("status", tmp_path / "store", "--json"))["ledger"] is None
    assert "held" not in json.loads(done("log", tmp_path / "store", "--json"))[0]


def test_the_status_of_a_ledger_does_not_load_torch(ledger: Path) -> None:
    code = "import sys; from mergestream.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code, "status", ledger], capture_output=True, text=True).stderr == ""


def test_remove_prints_no_scale_for_a_ledger(ledger: Path, done: Callable[..., str]) -> None:
    assert json.loads(done("remove", ledger, "expert-1", "--json"))["lambda"] is None
