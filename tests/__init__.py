"""Tests, with one thread each unless they ask for more: those of torch spin while they wait, and take the cores of the
processes that test beside them. Ray listens on the loopback only, which it decides when it is imported, by whichever
test comes first."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
