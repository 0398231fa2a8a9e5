"""A file with one line of JSON per step."""

from __future__ import annotations

import json
from pathlib import Path

from mergestream.tracking.step import TrackedStep


def send(target: str | None, step: TrackedStep) -> None:
    """Append a line to the file ``target``, by default beside the store."""
    path = Path(target or f"{step.place}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"store": step.store, "step": step.number, "expert": step.expert, "time": step.added, **step.scalars}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
