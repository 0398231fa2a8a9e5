"""The durable directory: manifest, lock, steps, and what is remembered of each expert."""

from mergestream.store.directory import StoreDirectory
from mergestream.store.manifest import Expert, Manifest

__all__ = ["Expert", "Manifest", "StoreDirectory"]
