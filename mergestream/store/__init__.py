"""The durable store: manifest, transactions, steps, records."""

from mergestream.store.manifest import Expert, Manifest
from mergestream.store.store import Store

__all__ = ["Expert", "Manifest", "Store"]
