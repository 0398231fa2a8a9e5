"""Merge fine-tuned models into one model as they arrive.

In a store, over weeks and across crashes::

    store = mergestream.Store.create("store", base="base-model", method=mergestream.OPCM(alpha=0.5))
    store.add("expert-1")
    store.export("merged")

In memory::

    merger = mergestream.Merger(base.state_dict(), mergestream.OPCM())
    merger.add(expert.state_dict())
    merged = merger.state_dict()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Store": "mergestream.store",
    "Expert": "mergestream.store",
    "Merger": "mergestream.merging.merger",
    "merge": "mergestream.export.one_shot",
    "MergestreamError": "mergestream.errors",
    "LocalEngine": "mergestream.engine",
    "METHODS": "mergestream.methods",
    "OPCM": "mergestream.methods",
    "Average": "mergestream.methods",
    "TaskArithmetic": "mergestream.methods",
    "TIES": "mergestream.methods",
    "EMA": "mergestream.methods",
    "LAWA": "mergestream.methods",
    "MagMax": "mergestream.methods",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds to load, and ``mergestream --help`` does not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mergestream' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


if TYPE_CHECKING:
    from mergestream.engine import LocalEngine
    from mergestream.errors import MergestreamError
    from mergestream.export.one_shot import merge
    from mergestream.merging.merger import Merger
    from mergestream.methods import EMA, LAWA, METHODS, OPCM, TIES, Average, MagMax, TaskArithmetic
    from mergestream.store import Expert, Store
