"""The ``text-lora`` suite: ``text`` with LoRA adapters as experts."""

from benchmarks.suites import text

SUITE = text.SUITE.with_lora()
