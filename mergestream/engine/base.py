"""What an engine is: it maps work over the tensors of a model, and knows nothing of what the work is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from mergestream.errors import MergestreamError
from mergestream.registry import Registry
from mergestream.sizes import format_size

Result = TypeVar("Result")
Finding = TypeVar("Finding")


class Engine(Protocol):
    """Runs work on named jobs, several at a time, within a budget."""

    @property
    def workers(self) -> int:
        """How many jobs run at a time."""

    @property
    def device(self) -> str:
        """Where the arithmetic of a job runs, as torch names it."""

    def run(
        self,
        costs: Mapping[str, int],
        work: Callable[[str], Result],
        memory: Mapping[str, int] | None = None,
    ) -> Iterator[tuple[str, Result]]:
        """Yield (name, work(name)) as they finish; the most costly jobs start first, and the first error is raised.

        ``memory`` gives the bytes of each job at its peak: within a budget a job waits until there is room for it.
        """


def check_budget(memory: Mapping[str, int], most: int | None) -> None:
    """Refuse a job that needs more memory than all of them may have."""
    largest = max(memory, key=lambda name: memory[name], default=None)
    if largest is not None and most is not None and memory[largest] > most:
        raise MergestreamError(
            f"tensor {largest} needs {format_size(memory[largest])} of memory to be merged, more than the "
            f"{format_size(most)} allowed; raise --max-memory"
        )


class Gathers(ABC):
    """What jobs leave something in beside their results. An engine whose jobs work on copies elsewhere asks these, once
    some jobs are done, and tells the original before it yields their results."""

    @abstractmethod
    def gathered(self) -> Any:
        """All that has been left here since this was last asked."""

    @abstractmethod
    def gather(self, more: Any) -> None:
        """Take what a copy has gathered."""


class Findings(dict[str, Finding], Gathers):
    """What is found out of each tensor on the way; a copy begins without."""

    def gathered(self) -> dict[str, Finding]:
        found = dict(self)
        self.clear()
        return found

    def gather(self, more: Mapping[str, Finding]) -> None:
        self.update(more)

    def __reduce__(self) -> tuple[Any, ...]:
        return Findings, ()


ENGINES: Registry[Callable[..., Engine]] = Registry(
    "engine",
    "mergestream.engines",
    {"local": "mergestream.engine.local:LocalEngine", "ray": "mergestream.engine.ray:RayEngine"},
)
"""Made with ``workers``, ``max_memory``, ``device`` and ``address``, each only where the user gave it."""
