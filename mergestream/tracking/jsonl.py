"""A line of JSON for every step, at the end of a file."""

from __future__ import annotations

import json
from pathlib import Path

from mergestream.tracking.step import TrackedStep


def send(target: str | None, step: TrackedStep) -> None:
    """``target`` is the file; beside the store by default."""
    path = Path(target or f"{step.place}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"store": step.store, "step": step.number, "expert": step.expert, "time": step.added, **step.scalars}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
