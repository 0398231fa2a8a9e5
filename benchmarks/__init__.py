"""Benchmarks: mergestream, its peers and the limits, measured in one run on the same files."""
