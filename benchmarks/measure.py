"""Run a command in a child process and record wall time, CPU seconds and peak anonymous memory."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.stopwatch import RESULT

ROOT = Path(__file__).parents[1]
SAMPLE_SECONDS = 0.03


@dataclass(frozen=True)
class Cost:
    """Cost of one run; `work` is what the runner recorded (see `stopwatch`)."""

    wall: float
    cpu: float
    anonymous: int
    work: dict[str, Any] = field(default_factory=dict)


def run(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Cost:
    """Run `command` in the repository; raise with the end of its output if it fails.

    Peak anonymous memory is the largest sum of RssAnon over the process and its descendants among samples
    every 30 ms: what the kernel cannot drop under pressure, unlike the pages of mapped files.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result, log = Path(scratch) / "result.json", Path(scratch) / "log"
        variables = {**os.environ, "PYTHONPATH": str(ROOT), RESULT: str(result), **(environment or {})}
        started = time.perf_counter()
        with log.open("wb") as output:
            child = subprocess.Popen(
                [str(part) for part in command], cwd=ROOT, env=variables, stdout=output, stderr=output
            )
        peak = 0
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            peak = max(peak, anonymous_memory(child.pid))
            time.sleep(SAMPLE_SECONDS)
        wall = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            tail = log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"exit code {child.returncode} from {' '.join(map(str, command))}\n{tail}")
        work = json.loads(result.read_text()) if result.exists() else {}
        return Cost(wall, usage.ru_utime + usage.ru_stime, peak, work)


def anonymous_memory(pid: int) -> int:
    """Return the anonymous memory of a process and its descendants in bytes; 0 after they exit."""
    try:
        with open(f"/proc/{pid}/status") as file:  # noqa: PTH123 (this runs often during a measurement)
            status = file.read()
        children = []
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with open(f"/proc/{pid}/task/{thread}/children") as file:  # noqa: PTH123
                children += file.read().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    own = next((line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")), "0")
    return int(own) * 1024 + sum(anonymous_memory(int(child)) for child in children)


def disk_bytes(directory: Path) -> int:
    """Return the bytes of all files; hard links count once."""
    files = {path.stat().st_ino: path.stat().st_size for path in directory.rglob("*") if path.is_file()}
    return sum(files.values())
