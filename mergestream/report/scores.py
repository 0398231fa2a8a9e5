"""Evaluations that are attached to a store: A[i][j], the score on task j after i models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from mergestream.digest import json_digest
from mergestream.display import matrix_frame
from mergestream.errors import MergestreamError
from mergestream.files import to_json
from mergestream.report.metrics import average_accuracy, backward_transfer
from mergestream.schema import damaged, invalid_file, validate
from mergestream.sizes import counted
from mergestream.storage import read_json

if TYPE_CHECKING:
    from pandas import DataFrame

    from mergestream.store import Expert, Store

NAME = "scores.json"
Row = Sequence[float | None]


@dataclass(frozen=True)
class TaskScore:
    """What the merged model, the task's expert alone and the base score; None where it was not measured."""

    task: str
    merged: float | None
    expert: float | None
    base: float | None

    @property
    def lost(self) -> float:
        """The share of what its expert scores alone; 0 where that is not known."""
        if self.merged is None or self.expert is None or self.expert <= 0:
            return 0.0
        return 1 - self.merged / self.expert


@dataclass(frozen=True)
class Scores:
    """Scores of the merged model after each step; tasks in the order in which their experts came."""

    tasks: tuple[str, ...]
    matrix: tuple[tuple[float | None, ...], ...]
    """One row per step, one entry per task; None where it was not measured"""
    metric: str = "accuracy"
    base: tuple[float | None, ...] | None = None
    """The base model's own"""
    experts: tuple[float | None, ...] | None = None
    """Each expert's, on its own task"""

    def to_frame(self) -> DataFrame:
        """Step × task; the base is step 0, where it was scored."""
        base = {0: self.base} if self.base else {}
        rows = base | dict(enumerate(self.matrix, 1))
        return matrix_frame(list(rows), self.tasks, list(rows.values())).rename_axis("step")

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
        """From any sequences, such as lists or the rows of an array."""

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
    def fault(self) -> str | None:
        """What is wrong with the numbers; None where nothing is."""
        if len(self.tasks) < len(self.matrix):
            return (
                f"there are {len(self.matrix)} rows of scores and {len(self.tasks)} tasks; "
                "name at least one task per step, in the order of the steps"
            )
        for row in (*self.matrix, self.base, self.experts):
            if row is not None and len(row) != len(self.tasks):
                return f"a row of scores has {len(row)} entries for {len(self.tasks)} tasks"
            if row is not None and not all(value is None or math.isfinite(value) for value in row):
                return "scores must be finite numbers, or None where they were not measured"
        return None

    def compared(self) -> tuple[TaskScore, ...]:
        """The tasks whose experts are merged, after the last step."""

        def entry(row: Row | None, task: int) -> float | None:
            return row[task] if row else None

        last = self.matrix[-1]
        return tuple(
            TaskScore(self.tasks[i], last[i], entry(self.experts, i), entry(self.base, i))
            for i in range(len(self.matrix))
        )

    @property
    def has_experts(self) -> bool:
        """Whether there is a task with the score of its own expert, to compare with."""
        return any(task.expert is not None for task in self.compared())

    @property
    def acc(self) -> float | None:
        """ACC: the mean over all tasks after the last step."""
        return average_accuracy(self.matrix)

    @property
    def bwt(self) -> float | None:
        """BWT: the mean change of the tasks since their own experts came, below 0 where they are forgotten."""
        return backward_transfer(self.matrix) if len(self.matrix) > 1 else None


def attach(store: Store, scores: Scores) -> None:
    """Keep scores in the store; they replace earlier ones."""
    if not scores.matrix or len(scores.matrix) > store.manifest.step:
        raise MergestreamError(
            f"{counted(len(scores.matrix), 'row')} of scores do not fit {store.place}, which has taken "
            f"{counted(store.manifest.step, 'step')}"
        )
    if fault := scores.fault:
        raise MergestreamError(fault)
    data = {
        **asdict(scores),
        # Scores belong to a state: after an undo and another add, they must not be shown for the new one.
        "states": [_state(entry) for entry in store.history[: len(scores.matrix)]],
    }
    storage, text = store.place, to_json({**data, "digest": json_digest(data)})
    storage.put_if(NAME, text.encode(), storage.stat(NAME))
    try:
        storage.sync()
    except OSError as error:  # they are written
        store.progress.note(f"{storage}/{NAME} is written, but may not survive a power cut: {error.strerror}")


def attached(store: Store) -> Scores | None:
    """The scores of the store's present history, or None."""
    path = f"{store.place}/{NAME}"
    if store.place.read(NAME) is None:
        return None
    data = read_json(store.place, NAME)
    if data.pop("digest", None) != json_digest(data):
        raise damaged(path, "its digest does not match", "attach the scores once more")
    scores, states = validate(data, Scores, path), validate(data.get("states"), list[str], path)
    if fault := scores.fault:
        raise invalid_file(path, fault)
    pairs = zip(states, store.history, strict=False)
    valid = len(list(takewhile(lambda pair: pair[0] == _state(pair[1]), pairs)))
    return replace(scores, matrix=scores.matrix[:valid]) if valid else None


def _state(entry: Expert) -> str:
    """The digest of the state after an expert; in a ledger that of the expert, because entries are cut later."""
    return entry.digest if entry.cut else entry.state
