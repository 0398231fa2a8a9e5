"""Suites of tasks: ``clip`` (the paper's), and your own. Those that train their experts are in a checkout, as files."""
