"""Scores by task that an evaluation harness such as lm-eval writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mergestream.commands import CommandError
from mergestream.errors import MergestreamError
from mergestream.files import read_json
from mergestream.sizes import shorten_list

if TYPE_CHECKING:
    from mergestream.store.manifest import Evaluation

TaskScores = dict[str, tuple[float, bool]]
"""By task: its score, and whether higher is better"""


def read_evaluation(command: str, directory: Path) -> Evaluation:
    """Read the JSON files that the command wrote: results of lm-eval, or objects such as ``{"task": 0.93}``.

    The score is the mean over the tasks for which higher is better, or over all if there are none.
    """
    found: TaskScores = {}
    try:
        for path in sorted(directory.rglob("*.json")):
            found |= _parse_scores(read_json(path))
    except MergestreamError as error:
        raise CommandError(f"--evaluate {command!r} wrote an unreadable file: {error}; nothing was added") from error
    if not found:
        raise CommandError(f"--evaluate {command!r} wrote no scores to {{scores}}; nothing was added")
    for task, (value, _) in found.items():
        if not math.isfinite(value):
            raise CommandError(f"--evaluate {command!r} gave {task} the score {value}; nothing was added")
    higher = [value for value, is_better in found.values() if is_better]
    score = fmean(higher or [value for value, _ in found.values()])
    return {"command": command, "score": score, "scores": {task: value for task, (value, _) in found.items()}}


def describe_evaluation(evaluation: Evaluation) -> str:
    """``0.71 (topic 0.92, code 0.5)``"""
    tasks = [f"{task} {value:.4g}" for task, value in evaluation.get("scores", {}).items()]
    return f"{evaluation['score']:.4g}" + (f" ({shorten_list(tasks, 10)})" if tasks else "")


def _parse_scores(content: Mapping[str, Any]) -> TaskScores:
    """The scores of lm-eval if there are ``results``, else all numbers at the top level.

    Each task has its first metric for which higher is better, or its first one. The subtasks of a group that has a
    score of its own are left out.
    """
    if not isinstance(content.get("results"), dict):
        return {task: (float(value), True) for task, value in content.items() if _is_number(value)}
    directions = _get_object(content, "higher_is_better")
    found: TaskScores = {}
    for task, metrics in content["results"].items():
        is_better = _get_object(directions, task)
        values = [
            (float(value), is_better.get(metric.partition(",")[0]) is not False)
            for metric, value in (metrics.items() if isinstance(metrics, dict) else ())
            if "," in metric and "_stderr," not in metric and _is_number(value)
        ]
        if values:
            found[task] = next((value for value in values if value[1]), values[0])
    groups = _get_object(content, "group_subtasks")
    subtasks = {task for group, tasks in groups.items() if group in found for task in tasks}
    return {task: value for task, value in found.items() if task not in subtasks}


def _get_object(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
