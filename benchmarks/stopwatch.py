"""The cost of a piece of work inside a process, without the imports before it.

Every runner puts the measured work in `with work():`. The seconds are written to the file in the environment variable
BENCHMARK_RESULT, which `benchmarks.measure` reads. Only the standard library is used, because the interpreter of the
other tools loads this file, too.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESULT = "BENCHMARK_RESULT"


@contextmanager
def work(**extra: Any) -> Iterator[dict[str, Any]]:
    """Time the block; entries of the yielded dictionary are recorded with the seconds."""
    facts = dict(extra)
    wall, cpu = time.perf_counter(), _cpu_seconds()
    yield facts
    facts = {"wall": time.perf_counter() - wall, "cpu": _cpu_seconds() - cpu, **facts}
    if RESULT in os.environ:
        Path(os.environ[RESULT]).write_text(json.dumps(facts))
    else:
        print(json.dumps(facts))


def _cpu_seconds() -> float:
    """Return user and system time of this process (all threads) and of its finished children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
