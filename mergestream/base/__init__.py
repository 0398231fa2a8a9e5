"""The base model θ⁰: which tensor is what, their digests, and a base without weights."""
