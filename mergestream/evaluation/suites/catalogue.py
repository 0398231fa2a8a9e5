"""Suites by name."""

from __future__ import annotations

from pathlib import Path

from mergestream.errors import UsageError
from mergestream.evaluation.suites.base import Suite


def open_suite(
    name: str,
    *,
    tasks: int | None = None,
    test_limit: int | None = None,
    model: str = "vit-b-32",
    evaluate: str | None = None,
) -> Suite:
    """``text``, ``vision``, ``clip``, or the path of a file that describes a suite of your own."""
    if Path(name).suffix in (".py", ".yaml", ".yml"):
        from mergestream.evaluation.suites.custom import load_suite

        return load_suite(Path(name), tasks, evaluate)
    if evaluate is not None:
        raise UsageError("--evaluate is for a suite of your own, a file ending in .py or .yaml")
    given = {key: value for key, value in (("tasks", tasks), ("test_limit", test_limit)) if value is not None}
    if name == "text":
        from mergestream.evaluation.suites.text import text_suite

        return text_suite(**given)
    if name == "vision":
        from mergestream.evaluation.suites.vision import vision_suite

        return vision_suite(**given)
    if name == "clip":
        from mergestream.evaluation.suites.clip import clip_suite

        return clip_suite(model, **given)
    raise UsageError(f"there is no suite {name!r}; there are text, vision, clip, and files ending in .py or .yaml")
