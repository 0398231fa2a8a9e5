"""Runners for other merging tools, executed by a separate interpreter (`make peers`)."""
