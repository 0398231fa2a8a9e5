"""The ``clip-vit-l-14`` suite: ``clip`` with ViT-L/14."""

from __future__ import annotations

from benchmarks.suites.clip_suite import ClipSuite

SUITE = ClipSuite(size="vit-l-14")
