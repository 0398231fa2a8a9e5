"""What an engine is: it maps work over the tensors of a model, and knows nothing of what the work is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar

from mergestream.registry import Registry

Result = TypeVar("Result")


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


ENGINES: Registry[Callable[..., Engine]] = Registry(
    "engine", "mergestream.engines", {"local": "mergestream.engine.local:LocalEngine"}
)
"""Made with ``workers``, ``max_memory`` and ``device``, each only where the user gave it."""
