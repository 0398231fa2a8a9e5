"""Results as Markdown and JSON, with the machine and the versions."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.cases import PEERS, have_peers
from benchmarks.measure import Cost
from benchmarks.suite import Suite, as_json


def machine() -> dict[str, Any]:
    """Describe the machine, the versions and the load."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.release(),
        "python": platform.python_version(),
        "load_before": [round(load, 1) for load in os.getloadavg()],
        "versions": {name: version(name) for name in ("mergestream", "torch", "numpy", "safetensors")}
        | (_peer_versions() if have_peers() else {}),
        "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def _peer_versions() -> dict[str, str]:
    names = ("fusion-bench", "mergekit")
    program = f"from importlib.metadata import version\nfor n in {names}: print(version(n))"
    found = subprocess.run([PEERS[0], "-c", program], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(names, found, strict=True))


def write(directory: Path, suite: Suite, about: dict[str, Any]) -> str:
    """Write results.json and results.md; returns the Markdown."""
    directory.mkdir(parents=True, exist_ok=True)
    about = {**about, "load_after": [round(load, 1) for load in os.getloadavg()]}
    (directory / "results.json").write_text(json.dumps({"machine": about, **as_json(suite)}, indent=1) + "\n")
    text = markdown(suite, about)
    (directory / "results.md").write_text(text)
    return text


def described(about: dict[str, Any]) -> str:
    """Describe the machine, the versions and the load in one sentence; call it after the run."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    loads = f"load average {about['load_before'][0]} before and {os.getloadavg()[0]:.1f} after the run"
    return (
        f"{about['cpu']}, {about['cores']} cores, {about['memory_GB']} GB, Linux {about['system']}, Python "
        f"{about['python']}; {versions}; {about['time']} UTC; {loads}"
    )


def markdown(suite: Suite, about: dict[str, Any]) -> str:
    lines = [
        f"{described(about)}. Median of {suite.repetitions} interleaved runs (peers: {suite.peer_repetitions}).",
        "",
        *table(
            ("work", "measured", "target", ""),
            [
                (t.work, t.measured, t.target, {True: "reached", False: "**missed**", None: ""}[t.reached])
                for t in suite.targets
            ],
        ),
        "",
        *table(
            (
                "case",
                "who",
                "wall, work (s)",
                "CPU, work (s)",
                "wall, process (s)",
                "CPU, process (s)",
                "anonymous (MB)",
            ),
            [_row(title, name, costs) for title, who in suite.measured.items() for name, costs in who.items()],
        ),
        "",
    ]
    return "\n".join(lines)


def _row(title: str, name: str, costs: Sequence[Cost]) -> tuple[str, ...]:
    def seconds(values: Sequence[float]) -> str:
        if not values:
            return "–"
        spread = f" ({min(values):.2f}–{max(values):.2f})" if len(values) > 1 else ""
        return f"{statistics.median(values):.2f}{spread}"

    work = [cost.work for cost in costs if cost.work]
    return (
        title,
        name,
        seconds([w["wall"] for w in work]),
        seconds([w["cpu"] for w in work]),
        seconds([cost.wall for cost in costs]),
        seconds([cost.cpu for cost in costs]),
        f"{max(cost.anonymous for cost in costs) / 1e6:.0f}",
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
