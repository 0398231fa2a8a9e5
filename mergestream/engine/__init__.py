"""Maps work over the tensors of a model; knows nothing of what the work is."""

from mergestream.engine.base import ENGINES, Engine, Findings, Gathers
from mergestream.engine.local import LocalEngine, single_threaded

__all__ = ["ENGINES", "Engine", "Findings", "Gathers", "LocalEngine", "single_threaded"]
