"""Scores: of the merged model after each step, attached to a store; and those that an evaluation harness writes.

A[i][j] is the score on task j after i + 1 experts, with tasks in the order of their experts. It is None if it was not
measured. A metric is None if an entry that it needs is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mergestream.commands import CommandError
from mergestream.digest import json_digest
from mergestream.errors import MergestreamError
from mergestream.files import read_json as read_json_file
from mergestream.files import to_json
from mergestream.schema import damaged, invalid_file, validate
from mergestream.sizes import counted, shorten_list
from mergestream.storage import read_json

if TYPE_CHECKING:
    from mergestream.store import Expert, Store
    from mergestream.store.expert import Evaluation

NAME = "scores.json"
Entry = float | None
Row = Sequence[Entry]
Matrix = Sequence[Row]
TaskScores = dict[str, tuple[float, bool]]
"""By task: its score, and whether higher is better"""


@dataclass(frozen=True)
class TaskScore:
    """The scores of the merged model, of the task's expert and of the base; None if not measured."""

    task: str
    merged: float | None
    expert: float | None
    base: float | None

    @property
    def lost(self) -> float:
        """The share of the expert's score that the merged model lost; 0 if that is not known."""
        if self.merged is None or self.expert is None or self.expert <= 0:
            return 0.0
        return 1 - self.merged / self.expert


@dataclass(frozen=True)
class Scores:
    """Scores of the merged model after each step; tasks are in the order of their experts."""

    tasks: tuple[str, ...]
    matrix: tuple[tuple[float | None, ...], ...]
    """One row per step, one entry per task; None if not measured"""
    metric: str = "accuracy"
    base: tuple[float | None, ...] | None = None
    """The scores of the base"""
    experts: tuple[float | None, ...] | None = None
    """The score of each expert on its own task"""

    @classmethod
    def of(
        cls,
        tasks: Sequence[str],
        matrix: Sequence[Row],
        *,
        base: Row | None = None,
        experts: Row | None = None,
        metric: str = "accuracy",
    ) -> Scores:
        """Scores from any sequences, such as lists or the rows of an array."""

        def entries(row: Row) -> tuple[float | None, ...]:
            return tuple(None if value is None else float(value) for value in row)

        return cls(
            tuple(tasks),
            tuple(map(entries, matrix)),
            metric,
            None if base is None else entries(base),
            None if experts is None else entries(experts),
        )

    @property
    def error(self) -> str | None:
        """What is wrong with the numbers, or None."""
        if not self.matrix:
            return "there are no rows of scores"
        if len(self.tasks) < len(self.matrix):
            return (
                f"there are {len(self.matrix)} rows of scores and {len(self.tasks)} tasks; "
                "name at least one task per step, in the order of the steps"
            )
        for row in (*self.matrix, self.base, self.experts):
            if row is not None and len(row) != len(self.tasks):
                return f"a row of scores has {len(row)} entries for {len(self.tasks)} tasks"
            if row is not None and not all(value is None or math.isfinite(value) for value in row):
                return "scores must be finite numbers, or None if not measured"
        return None

    def compared(self) -> tuple[TaskScore, ...]:
        """The tasks whose experts are merged, after the last step."""
        unknown = (None,) * len(self.tasks)
        columns = (self.tasks[: len(self.matrix)], self.matrix[-1], self.experts or unknown, self.base or unknown)
        return tuple(map(TaskScore, *columns))

    @property
    def has_experts(self) -> bool:
        """Whether an expert was scored on its own task."""
        return any(task.expert is not None for task in self.compared())

    @property
    def acc(self) -> float | None:
        """ACC: the mean over all tasks after the last step."""
        return average_accuracy(self.matrix)

    @property
    def bwt(self) -> float | None:
        """BWT: the mean change of the tasks since their experts were added; below 0 they are forgotten."""
        return backward_transfer(self.matrix)


def attach(store: Store, scores: Scores) -> None:
    """Write scores to the store; they replace earlier ones."""
    if not scores.matrix or len(scores.matrix) > store.manifest.step:
        raise MergestreamError(
            f"{counted(len(scores.matrix), 'row')} of scores do not fit {store.storage}, "
            f"which has {counted(store.manifest.step, 'expert')}"
        )
    if scores.error:
        raise MergestreamError(scores.error)
    data = {
        **asdict(scores),
        # Scores belong to a state: after an undo and another add they are not valid.
        "states": [_state(entry) for entry in store.history[: len(scores.matrix)]],
    }
    storage, text = store.storage, to_json({**data, "digest": json_digest(data)})
    storage.put_if(NAME, text.encode(), storage.stat(NAME))
    try:
        storage.sync()
    except OSError as error:  # they are written
        store.progress.note(f"{storage}/{NAME} is written, but may not survive a power cut: {error.strerror}")


def attached(store: Store) -> Scores | None:
    """The scores that are valid for the history of the store, or None."""
    path = f"{store.storage}/{NAME}"
    if store.storage.read(NAME) is None:
        return None
    data = read_json(store.storage, NAME)
    if data.pop("digest", None) != json_digest(data):
        raise damaged(path, "its digest does not match", "attach the scores once more")
    scores, states = validate(data, Scores, path), validate(data.get("states"), list[str], path)
    if scores.error:
        raise invalid_file(path, scores.error)
    pairs = zip(states, store.history, strict=False)
    valid = len(list(takewhile(lambda pair: pair[0] == _state(pair[1]), pairs)))
    return replace(scores, matrix=scores.matrix[:valid]) if valid else None


def _state(entry: Expert) -> str:
    """The digest of the state after an expert; in a ledger that of the expert, because entries are cut later."""
    return entry.digest if entry.cut else entry.state


def mean(values: Row) -> Entry:
    """The mean; None if a value is missing."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def average_accuracy(matrix: Matrix) -> Entry:
    """ACC: the mean over all tasks after the last expert."""
    return mean(matrix[-1])


def backward_transfer(matrix: Matrix) -> Entry:
    """BWT: the mean change of a task since its own expert was added, over all tasks except the last."""
    last = len(matrix) - 1
    return mean([difference(matrix[last][i], matrix[i][i]) for i in range(last)])


def difference(left: Entry, right: Entry) -> Entry:
    return None if left is None or right is None else left - right


def read_evaluation(command: str, directory: Path) -> Evaluation:
    """Read the JSON files that the command wrote: results of lm-eval, or objects such as ``{"task": 0.93}``.

    The score is the mean over the tasks for which higher is better, or over all if there are none.
    """
    found: TaskScores = {}
    try:
        for path in sorted(directory.rglob("*.json")):
            found |= _parse_scores(read_json_file(path))
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
