"""The paper's own numbers, shipped for comparison. They are read, never recomputed, and always marked as such."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def paper_results() -> dict[str, Any]:
    """``table1``, ``single_model``, ``per_task_20`` and ``task_groups`` as printed in the paper."""
    loaded: dict[str, Any] = json.loads(
        files("mergestream.evaluation").joinpath("paper_results.json").read_text("utf-8")
    )
    return loaded


def table1_value(metric: str, method: str, arch: str, tasks: int) -> tuple[float, float | None] | None:
    """Mean and standard deviation in percent, for example of ``("acc", "OPCM", "ViT-B/32", 8)``."""
    for entry in paper_results()["table1"]:
        if (entry["metric"], entry["method"], entry["arch"], entry["tasks"]) == (metric, method, arch, tasks):
            return entry["mean"], entry["std"]
    return None
