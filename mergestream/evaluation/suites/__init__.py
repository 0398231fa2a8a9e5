"""Suites of tasks: ``clip`` (the paper's), and your own. ``text`` and ``vision`` are in a checkout, as files."""
