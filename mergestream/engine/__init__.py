"""Maps work over the tensors of a model; knows nothing of what the work is."""

from mergestream.engine.local import LocalEngine, single_threaded
from mergestream.engine.selection import kth_magnitude

__all__ = ["LocalEngine", "kth_magnitude", "single_threaded"]
