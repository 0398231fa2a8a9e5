"""Benchmarks of mergestream, of other merging tools and of hardware limits, on the same files."""
