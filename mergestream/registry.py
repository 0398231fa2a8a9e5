"""Registry of named plug-ins: built-in, from entry points of other packages, or registered in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Generic, TypeVar

from mergestream.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to plug-ins; modules are imported on first use.

    ``own`` maps each built-in name to ``module:attribute``. Other packages add names through entry points of
    ``group``; they cannot replace a built-in name. ``check(name, item)`` raises if an external plug-in is invalid.
    """

    def __init__(
        self, kind: str, group: str, own: Mapping[str, str], check: Callable[[str, T], None] = lambda name, item: None
    ) -> None:
        self.kind, self.group = kind, group
        self._own, self._check = own, check
        self._registered: dict[str, T] = {}

    def register(self, name: str, item: T) -> T:
        """Add a plug-in under a name, in this process."""
        if name in self._own:
            raise UsageError(f"{name} is a {self.kind} of mergestream itself; choose another name")
        try:
            self._check(name, item)
        except Exception as error:
            raise UsageError(f"the {self.kind} {name} cannot be registered: {error}") from error
        self._registered[name] = item
        return item

    def choose(self, name: str) -> T:
        """Look up a name; an unknown one is refused with the list of known names."""
        if name not in self:
            raise UsageError(f"there is no {self.kind} {name}{did_you_mean(name, self)} (there are: {', '.join(self)})")
        return self[name]

    def origin(self, name: str) -> str:
        """Where a plug-in comes from: ``mergestream``, a package with its version, or ``Python``."""
        if name in self._own:
            return "mergestream"
        if name in self._registered:
            return "Python"
        distribution = self._external[name].dist
        return f"{distribution.name} {distribution.version}" if distribution else "an entry point"

    def __getitem__(self, name: str) -> T:
        if name in self._own:
            module, _, attribute = self._own[name].partition(":")
            item: T = getattr(import_module(module), attribute)
            return item
        if name in self._registered:
            return self._registered[name]
        entry = self._external[name]
        try:
            loaded: T = entry.load()
            self._check(name, loaded)
        except Exception as error:  # importing another package may raise anything
            raise UsageError(f"the {self.kind} {name} of {self.origin(name)} cannot be loaded: {error!r}") from error
        return loaded

    def __iter__(self) -> Iterator[str]:
        return iter({**self._own, **self._registered, **self._external})

    def __len__(self) -> int:
        return len(list(iter(self)))

    @cached_property
    def _external(self) -> dict[str, EntryPoint]:
        from importlib.metadata import entry_points  # takes 40 ms to import, and most commands do without

        return {entry.name: entry for entry in entry_points(group=self.group)}
