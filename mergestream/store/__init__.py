"""The durable store: manifest, transactions, steps, records."""

from mergestream.store.expert import Expert
from mergestream.store.manifest import Manifest
from mergestream.store.store import Store

__all__ = ["Expert", "Manifest", "Store"]
