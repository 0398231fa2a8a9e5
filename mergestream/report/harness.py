"""What a harness such as lm-eval writes of a model: scores by task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mergestream.commands import CommandError
from mergestream.errors import MergestreamError
from mergestream.files import read_json

if TYPE_CHECKING:
    from mergestream.store.manifest import Evaluation

_TOLD = 10
"""Tasks that are told of in one line"""

Found = dict[str, tuple[float, bool]]
"""By task: its score, and whether a higher one is better"""


def read_evaluation(command: str, directory: Path) -> Evaluation:
    """What the command has written to the directory: files of lm-eval's results, or objects such as
    ``{"task": 0.93}``. The score is the mean over the tasks of which a higher score is better, where there are any."""
    found: Found = {}
    try:
        for path in sorted(directory.rglob("*.json")):
            found |= _scores(read_json(path))
    except MergestreamError as error:
        raise CommandError(f"--evaluate {command!r} wrote what cannot be read: {error}; nothing was added") from error
    if not found:
        raise CommandError(f"--evaluate {command!r} wrote no scores to {{scores}}; nothing was added")
    for task, (value, _) in found.items():
        if not math.isfinite(value):
            raise CommandError(f"--evaluate {command!r} gave {task} the score {value}; nothing was added")
    higher = [value for value, higher in found.values() if higher]
    score = fmean(higher or [value for value, _ in found.values()])
    return {"command": command, "score": score, "scores": {task: value for task, (value, _) in found.items()}}


def describe_evaluation(evaluation: Evaluation) -> str:
    """``0.71 (topic 0.92, code 0.5)``"""
    scores = evaluation.get("scores", {})
    tasks = [f"{task} {value:.4g}" for task, value in scores.items()]
    more = [f"… and {len(tasks) - _TOLD} more"] if len(tasks) > _TOLD else []
    by_task = f" ({', '.join([*tasks[:_TOLD], *more])})" if tasks else ""
    return f"{evaluation['score']:.4g}{by_task}"


def _scores(content: Mapping[str, Any]) -> Found:
    results = content.get("results")
    if isinstance(results, dict):
        return _of_lm_eval(results, _table(content, "higher_is_better"), _table(content, "group_subtasks"))
    return {task: (float(value), True) for task, value in content.items() if _is_number(value)}


def _of_lm_eval(
    results: Mapping[str, Any], higher_is_better: Mapping[str, Any], groups: Mapping[str, list[str]]
) -> Found:
    """Of every task, or of the group that it belongs to where that has a score of its own, the first metric of which
    more is better, else the first."""
    found: Found = {}
    for task, metrics in results.items():
        better = _table(higher_is_better, task)
        values = [
            (float(value), better.get(metric.partition(",")[0]) is not False)
            for metric, value in (metrics.items() if isinstance(metrics, dict) else ())
            if "," in metric and "_stderr," not in metric and _is_number(value)
        ]
        if values:
            found[task] = next((value for value in values if value[1]), values[0])
    within = {task for group, tasks in groups.items() if group in found for task in tasks}
    return {task: value for task, value in found.items() if task not in within}


def _table(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
