"""Benchmarks: merge the experts of a suite in many orders and score every task after each step.

* ``suites``: a base, experts and how to score them; ``rows``: methods to compare
* ``bench`` runs ``streams`` (one method in one order) in parallel
* ``results``: all measurements and their metrics; ``tables``: tables of them
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mergestream.errors import MergestreamError


@contextmanager
def explain_missing_packages() -> Iterator[None]:
    """Turn a failed import of an optional package into a sentence that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MergestreamError(
            f"bench needs the module {error.name}: pip install 'mergestream[evaluate]'; "
            "the suites of a checkout need 'mergestream[suites]', and clip needs 'mergestream[clip]'"
        ) from error
