"""The ``clip`` suite: the paper's own models, experts and data sets, from the hub."""

from __future__ import annotations

from benchmarks.suites.clip_suite import ClipSuite

SUITE = ClipSuite()
