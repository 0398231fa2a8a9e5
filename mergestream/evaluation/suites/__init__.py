"""Suites of tasks: the interface, ``clip`` (the paper's), and suites from files."""
