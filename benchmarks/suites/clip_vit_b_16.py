"""The ``clip-vit-b-16`` suite: ``clip`` with ViT-B/16."""

from __future__ import annotations

from benchmarks.suites.clip_suite import ClipSuite

SUITE = ClipSuite(size="vit-b-16")
