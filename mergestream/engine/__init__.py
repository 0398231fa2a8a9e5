"""Engines run a function on every tensor of a model, on threads or on a Ray cluster."""

from mergestream.engine.base import ENGINES, Collector, Engine, ResultsByTensor
from mergestream.engine.local import LocalEngine, single_threaded

__all__ = ["ENGINES", "Collector", "Engine", "LocalEngine", "ResultsByTensor", "single_threaded"]
