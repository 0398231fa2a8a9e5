"""The ``vision-lora`` suite: ``vision`` with LoRA adapters as experts."""

from benchmarks.suites import vision

SUITE = vision.SUITE.with_lora()
