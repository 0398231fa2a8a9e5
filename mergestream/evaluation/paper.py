"""The paper's own numbers, for comparison where they are at hand: read, never recomputed, and always marked."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from mergestream.evaluation import checkout


@cache
def paper_results() -> dict[str, Any]:
    """``table1``, ``single_model``, ``per_task_20`` and ``task_groups`` as printed; nothing without a checkout."""
    path = checkout.find("paper_results.json")
    loaded: dict[str, Any] = json.loads(path.read_text("utf-8")) if path else {}
    return loaded


def table1_value(metric: str, method: str, arch: str, tasks: int) -> tuple[float, float | None] | None:
    """Mean and standard deviation in percent, for example of ``("acc", "OPCM", "ViT-B/32", 8)``."""
    for entry in paper_results().get("table1", ()):
        if (entry["metric"], entry["method"], entry["arch"], entry["tasks"]) == (metric, method, arch, tasks):
            return entry["mean"], entry["std"]
    return None
