"""Suites of tasks: ``text`` and ``vision`` (offline), ``clip`` (the paper's), and your own."""
