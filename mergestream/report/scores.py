"""Evaluations that are attached to a store: A[i][j], the score on task j after i + 1 experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from mergestream.digest import json_digest
from mergestream.errors import MergestreamError
from mergestream.files import to_json
from mergestream.report.metrics import average_accuracy, backward_transfer
from mergestream.schema import damaged, invalid_file, validate
from mergestream.sizes import counted
from mergestream.storage import read_json

if TYPE_CHECKING:
    from mergestream.store import Expert, Store

NAME = "scores.json"
Row = Sequence[float | None]


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
        return backward_transfer(self.matrix) if len(self.matrix) > 1 else None


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
