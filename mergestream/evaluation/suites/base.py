"""The interface of a suite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex, TypeVar

from mergestream.errors import UsageError

T = TypeVar("T")


class Suite(ABC):
    """A base model, an expert for every task, and a way to score any model on any task."""

    name: str
    model_name: str
    tasks: tuple[str, ...]
    can_fine_tune: ClassVar[bool] = False
    """Whether there is training data, for continual fine-tuning"""
    beside: ClassVar[tuple[str, ...]] = ()
    """Other measures of a merged model, such as perplexity; ``accuracy`` takes their names in place of a task"""
    reopened: tuple[Callable[..., Suite], tuple[Any, ...]] | None = None
    """The call that loads a suite from its file again, in another process"""

    @abstractmethod
    def base(self) -> Path:
        """Return the directory of the base."""

    @abstractmethod
    def expert(self, task: str) -> Path:
        """Return the directory of a task's expert."""

    @abstractmethod
    def accuracy(self, model: Path, task: str) -> float:
        """Return the accuracy of the model in that directory, between 0 and 1; or another measure."""

    @abstractmethod
    def evaluation_key(self, task: str) -> str:
        """Return a digest of everything besides the model that decides the accuracy: data, head, protocol."""

    def protocol(self) -> dict[str, Any]:
        """Describe how the numbers are made, for the results."""
        return {}

    def prepare(self, on_progress: Callable[[str, int, int], None], workers: int) -> None:
        """Make all experts before the streams start; ``on_progress(task, parts done, total)`` shows it."""
        for task in self.tasks:
            self.expert(task)

    def fine_tune(self, start: Path, task: str, output: Path) -> None:
        """Train ``start`` with the experts' recipe (continual fine-tuning)."""
        raise UsageError(f"the suite {self.name} has no training data, so it cannot be fine-tuned continually")

    def limited(self, tasks: int | None = None, test_limit: int | None = None) -> Suite:
        """Return the suite with its first ``tasks`` tasks and ``test_limit`` samples each; None changes nothing."""
        for option, value in (("--tasks", tasks), ("--test-limit", test_limit)):
            if value is not None:
                raise UsageError(f"the suite {self.name} cannot be limited; leave {option} out")
        return self

    def of_model(self, model: str) -> Suite:
        """Return the same tasks with another base and its experts."""
        raise UsageError(f"the suite {self.name} has one model, {self.model_name}; leave --model out")

    def scored_by(self, command: str) -> Suite:
        """Return the same experts, scored by a command."""
        raise UsageError(f"the suite {self.name} scores its models itself; --evaluate is for a suite of your own")

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        # Another process cannot import what a suite's file defines, but it can load the file.
        return self.reopened or super().__reduce_ex__(protocol)


def first_tasks(suite: str, tasks: Sequence[T], count: int) -> Sequence[T]:
    """Return the first ``count`` tasks of a suite; a stream needs two."""
    if not 2 <= count <= len(tasks):
        raise UsageError(f"the suite {suite} has between 2 and {len(tasks)} tasks, not {count}")
    return tasks[:count]
