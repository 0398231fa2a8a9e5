"""What the benchmark asks of a suite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex, TypeVar

from mergestream.errors import UsageError

T = TypeVar("T")


class Suite(ABC):
    """A base model, an expert for every task, and a way to score any model on any task."""

    name: str
    model_name: str
    tasks: tuple[str, ...]
    can_fine_tune: ClassVar[bool] = False  # whether there is training data, for continual fine-tuning
    beside: ClassVar[tuple[str, ...]] = ()  # what ``accuracy`` also tells of a model of all tasks, and is no accuracy
    reopened: tuple[Callable[..., Suite], tuple[Any, ...]] | None = None
    """The call that gives a suite of a file once more, in another process"""

    @abstractmethod
    def base(self) -> Path: ...

    @abstractmethod
    def expert(self, task: str) -> Path: ...

    @abstractmethod
    def accuracy(self, model: Path, task: str) -> float:
        """Accuracy, between 0 and 1, of the model in that directory; or one of the measures ``beside`` the tasks."""

    @abstractmethod
    def evaluation_key(self, task: str) -> str:
        """A digest of all that decides the accuracy besides the model: test data, head, protocol."""

    def protocol(self) -> dict[str, Any]:
        """What a reader needs to know about how the numbers were made (goes into the results)."""
        return {}

    def prepare(self, on_event: Callable[[str, int, int], None], workers: int) -> None:
        """Have all experts at hand before the streams start; ``on_event(task, steps done, steps in all)``."""
        for task in self.tasks:
            self.expert(task)

    def fine_tune(self, start: Path, task: str, output: Path) -> None:
        """Train on from ``start`` with the experts' recipe (continual fine-tuning)."""
        raise UsageError(f"the suite {self.name} has no training data, so it cannot be fine-tuned continually")

    def limited(self, tasks: int | None = None, test_limit: int | None = None) -> Suite:
        """This suite with its first ``tasks`` tasks, scored on ``test_limit`` samples each; None changes nothing."""
        for option, value in (("--tasks", tasks), ("--test-limit", test_limit)):
            if value is not None:
                raise UsageError(f"the suite {self.name} cannot be limited; leave {option} out")
        return self

    def of_model(self, model: str) -> Suite:
        """The same tasks with another base and its experts."""
        raise UsageError(f"the suite {self.name} has one model, {self.model_name}; leave --model out")

    def scored_by(self, command: str) -> Suite:
        """The same experts, scored by a user's command."""
        raise UsageError(f"the suite {self.name} scores its models itself; --evaluate is for a suite of your own")

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        # No other process can import what a suite's file defines, but it can read the file.
        return self.reopened or super().__reduce_ex__(protocol)


@dataclass(frozen=True)
class Choices:
    """What a user chooses of a suite; None leaves it as it is."""

    tasks: int | None = None
    test_limit: int | None = None
    model: str | None = None
    evaluate: str | None = None

    def of(self, suite: Suite) -> Suite:
        if self.model is not None:
            suite = suite.of_model(self.model)
        if self.evaluate is not None:
            suite = suite.scored_by(self.evaluate)
        return suite.limited(self.tasks, self.test_limit)


def first_tasks(suite: str, tasks: Sequence[T], count: int) -> Sequence[T]:
    """The first ``count`` tasks of a suite; a stream needs two."""
    if not 2 <= count <= len(tasks):
        raise UsageError(f"the suite {suite} has between 2 and {len(tasks)} tasks, not {count}")
    return tasks[:count]
