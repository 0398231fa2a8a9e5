"""Merge fine-tuned models into one model as they arrive.

In a store, over weeks and across crashes::

    store = mergestream.Store.create("store", base="base-model")
    store.add("expert-1")
    store.export("merged")

In memory::

    merger = mergestream.Merger(base.state_dict())
    merger.add(expert.state_dict())
    merged = merger.state_dict()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

_NAMES = {
    "store.store": ("Store",),
    "store.manifest": ("Expert",),
    "inputs.reading": ("Inputs",),
    "merging.merger": ("Merger",),
    "export.one_shot": ("merge",),
    "routed": ("RoutedModel",),
    "errors": ("MergestreamError", "MergestreamWarning"),
    "checkpoints.hub": ("download",),
    "engine": ("Engine", "LocalEngine", "ENGINES"),
    "engine.ray": ("RayEngine",),
    "methods": ("METHODS", "make_method", "register_method"),
    "ledger.readouts": ("READOUTS", "register_readout"),
    "ledger.readouts.base": ("EntriesReadout",),
    "methods.base": ("Method",),
    "ledger.method": ("Ledger",),
    "methods.opcm": ("OPCM",),
    "methods.average": ("Average",),
    "methods.task_arithmetic": ("TaskArithmetic",),
    "methods.ties": ("TIES",),
    "methods.ema": ("EMA",),
    "methods.lawa": ("LAWA",),
    "methods.magmax": ("MagMax",),
    "methods.dare": ("DARE",),
    "methods.model_stock": ("ModelStock",),
    "methods.slerp": ("SLERP",),
    "methods.weighted": ("Weighted",),
}
"""What each module provides"""
_HOMES = {name: f"mergestream.{module}" for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOMES]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds to load, and ``mergestream --help`` does not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mergestream' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


if TYPE_CHECKING:
    from mergestream.checkpoints.hub import download as download
    from mergestream.engine import ENGINES as ENGINES
    from mergestream.engine import Engine as Engine
    from mergestream.engine import LocalEngine as LocalEngine
    from mergestream.engine.ray import RayEngine as RayEngine
    from mergestream.errors import MergestreamError as MergestreamError
    from mergestream.errors import MergestreamWarning as MergestreamWarning
    from mergestream.export.one_shot import merge as merge
    from mergestream.inputs.reading import Inputs as Inputs
    from mergestream.ledger.method import Ledger as Ledger
    from mergestream.ledger.readouts import READOUTS as READOUTS
    from mergestream.ledger.readouts import register_readout as register_readout
    from mergestream.ledger.readouts.base import EntriesReadout as EntriesReadout
    from mergestream.merging.merger import Merger as Merger
    from mergestream.methods import METHODS as METHODS
    from mergestream.methods import make_method as make_method
    from mergestream.methods import register_method as register_method
    from mergestream.methods.average import Average as Average
    from mergestream.methods.base import Method as Method
    from mergestream.methods.dare import DARE as DARE
    from mergestream.methods.ema import EMA as EMA
    from mergestream.methods.lawa import LAWA as LAWA
    from mergestream.methods.magmax import MagMax as MagMax
    from mergestream.methods.model_stock import ModelStock as ModelStock
    from mergestream.methods.opcm import OPCM as OPCM
    from mergestream.methods.slerp import SLERP as SLERP
    from mergestream.methods.task_arithmetic import TaskArithmetic as TaskArithmetic
    from mergestream.methods.ties import TIES as TIES
    from mergestream.methods.weighted import Weighted as Weighted
    from mergestream.routed import RoutedModel as RoutedModel
    from mergestream.store.expert import Expert as Expert
    from mergestream.store.store import Store as Store
