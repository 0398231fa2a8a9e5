"""What a checkout of the repository has beside the package: the offline suites, and the paper's numbers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

OFFLINE_SUITES = ("text", "vision", "text-lora", "vision-lora", "text-base", "language", "language-tiny")
SUITES = Path(__file__).resolve().parents[2] / "benchmarks" / "suites"


def find(name: str) -> Path | None:
    """A file of ``benchmarks/suites``; None where the package was installed without it."""
    path = SUITES / name
    return path if path.is_file() else None


@cache
def paper_results() -> dict[str, Any]:
    """``table1``, ``single_model``, ``per_task_20`` and ``task_groups`` as printed: read for comparison,
    never recomputed, and always marked. Nothing without a checkout."""
    path = find("paper_results.json")
    loaded: dict[str, Any] = json.loads(path.read_text("utf-8")) if path else {}
    return loaded


def table1_value(metric: str, method: str, arch: str, tasks: int) -> tuple[float, float | None] | None:
    """Mean and standard deviation in percent, for example of ``("acc", "OPCM", "ViT-B/32", 8)``."""
    for entry in paper_results().get("table1", ()):
        if (entry["metric"], entry["method"], entry["arch"], entry["tasks"]) == (metric, method, arch, tasks):
            return entry["mean"], entry["std"]
    return None
