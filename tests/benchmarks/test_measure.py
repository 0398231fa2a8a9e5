import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.floor import floor
from benchmarks.measure import run

SPEND = """
import time
from benchmarks.stopwatch import work
with work() as facts:
    held = b"x" * 200_000_000
    end = time.process_time() + 0.3
    while time.process_time() < end: pass
    facts["answer"] = 42
"""


def test_wall_cpu_and_anonymous_memory_of_a_child() -> None:
    cost = run((sys.executable, "-c", SPEND))
    assert 0.3 <= cost.work["cpu"] <= cost.cpu <= cost.wall + 0.5
    assert cost.work["wall"] <= cost.wall
    assert cost.work["answer"] == 42
    assert 200e6 < cost.anonymous < 300e6


def test_a_mapped_file_is_no_anonymous_memory(tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(b"x" * 200_000_000)
    program = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(sum(view[i] for i in range(0, len(view), 4096)))
"""
    cost = run((sys.executable, "-c", program, file))
    assert cost.anonymous < 100e6


def test_memory_of_grandchildren_counts() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    held = "import time; held = b'x' * 150_000_000; time.sleep(0.3)"
    assert run((sys.executable, "-c", program, held)).anonymous > 150e6


def test_a_failure_shows_the_end_of_the_output() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)exit code 1.*no such thing"):
        run((sys.executable, "-c", "raise SystemExit('no such thing')"))


def test_the_floor_writes_the_bytes_of_one_input(tmp_path: Path) -> None:
    for name in ("base", "expert"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.randn(8, 8)}, tmp_path / name / "model.safetensors")
    floor([tmp_path / "base", tmp_path / "expert"], tmp_path / "expert", tmp_path / "out")
    written, copied = (load_file(tmp_path / name / "model.safetensors")["w"] for name in ("out", "expert"))
    assert torch.equal(written, copied)
