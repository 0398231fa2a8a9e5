"""Maps work over the tensors of a model; knows nothing of what the work is."""

from mergestream.engine.base import ENGINES, Collector, Engine, ResultsByTensor
from mergestream.engine.local import LocalEngine, single_threaded

__all__ = ["ENGINES", "Collector", "Engine", "LocalEngine", "ResultsByTensor", "single_threaded"]
