"""The ``text-lora`` suite: ``text``, but its experts are LoRA adapters."""

from benchmarks.suites import text

SUITE = text.SUITE.with_lora()
