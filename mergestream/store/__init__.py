"""The durable store: a directory that absorbs models one by one and survives whatever happens."""

from mergestream.store.manifest import Expert
from mergestream.store.store import Store

__all__ = ["Expert", "Store"]
