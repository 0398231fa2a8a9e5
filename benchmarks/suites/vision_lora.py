"""The ``vision-lora`` suite: ``vision``, but its experts are LoRA adapters."""

from benchmarks.suites import vision

SUITE = vision.SUITE.with_lora()
