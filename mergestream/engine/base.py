"""The interface of engines: they run a function on every tensor of a model, whatever the function does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from mergestream.errors import MergestreamError
from mergestream.registry import Registry
from mergestream.sizes import format_size

Result = TypeVar("Result")
Value = TypeVar("Value")


class Engine(Protocol):
    """Runs work on named jobs, several at a time, within a budget."""

    @property
    def workers(self) -> int:
        """How many jobs run at a time."""

    @property
    def device(self) -> str:
        """The torch device that computes."""

    def run(
        self, costs: Mapping[str, int], work: Callable[[str], Result], memory: Mapping[str, int] | None = None
    ) -> Iterator[tuple[str, Result]]:
        """Yield (name, work(name)) as they finish; the most costly jobs start first, and the first error is raised.

        ``memory`` gives the bytes of each job at its peak: within a budget a job waits until there is room for it.
        """


def check_budget(memory: Mapping[str, int], most: int | None, remedy: str = "allowed; raise --max-memory") -> None:
    """Refuse a job that needs more than ``most`` bytes of memory; ``remedy`` ends the error."""
    largest = max(memory, key=lambda name: memory[name], default=None)
    if largest is not None and most is not None and memory[largest] > most:
        needed = f"tensor {largest} needs {format_size(memory[largest])} of memory"
        raise MergestreamError(f"{needed}, more than the {format_size(most)} {remedy}")


class Collector(ABC):
    """An object in which jobs collect results beside what they return.

    An engine that runs jobs on copies elsewhere asks each copy for its part, and merges the parts into the original
    before it yields the results of these jobs.
    """

    @abstractmethod
    def collected(self) -> Any:
        """Everything collected here since the last call."""

    @abstractmethod
    def collect(self, more: Any) -> None:
        """Merge what a copy has collected."""


class ResultsByTensor(dict[str, Value], Collector):
    """Results collected by tensor name; a copy for a worker begins empty."""

    def collected(self) -> dict[str, Value]:
        found = dict(self)
        self.clear()
        return found

    def collect(self, more: Mapping[str, Value]) -> None:
        self.update(more)

    def __reduce__(self) -> tuple[Any, ...]:
        return ResultsByTensor, ()


ENGINES: Registry[Callable[..., Engine]] = Registry(
    "engine",
    "mergestream.engines",
    {"local": "mergestream.engine.local:LocalEngine", "ray": "mergestream.engine.ray:RayEngine"},
)
"""Called with those of ``workers``, ``max_memory``, ``device`` and ``address`` that the user gave"""
