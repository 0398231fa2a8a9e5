"""Tests, with one thread each unless they ask for more: those of torch spin while they wait, and take the cores of the
processes that test beside them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
