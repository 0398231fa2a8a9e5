"""The base model θ⁰: roles of its tensors, digests, and a base without weights."""
