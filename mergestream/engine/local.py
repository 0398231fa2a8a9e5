"""An engine that runs work on threads of this process, within a memory budget."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from mergestream.engine.base import Result, check_budget
from mergestream.errors import MergestreamError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@cache
def keep_freed_memory() -> None:
    """Let glibc reuse freed memory, up to 64 MB per thread, instead of returning it to the kernel.

    By default glibc returns intermediate results of a megabyte to the kernel, which clears the pages of the next one:
    a quarter of the time of a first adapter. Blocks of more than 32 MB are still returned.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run torch and LAPACK on one thread: parallelism is over tensors, and a sum that is split over
    threads would depend on their number."""
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):  # NumPy's: torch has a setting of its own
            yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class LocalEngine:
    """Runs a function over named jobs on threads of this process.

    torch releases the interpreter lock in every kernel. Each job is single-threaded inside, so the results are
    bit-identical for any number of workers.
    """

    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    max_memory: int | None = None
    device: str = "cpu"
    """The torch device that computes"""

    def run(
        self, costs: Mapping[str, int], work: Callable[[str], Result], memory: Mapping[str, int] | None = None
    ) -> Iterator[tuple[str, Result]]:
        """A job starts when the memory of all running jobs, itself included, fits the budget. The first error stops
        further jobs and is raised."""
        import torch

        memory = memory or {}
        check_budget(memory, self.max_memory)
        keep_freed_memory()
        waiting = sorted(costs, key=lambda name: (-costs[name], name))
        if self.workers == 1:  # a second thread would only share the interpreter's lock
            with single_threaded():
                for name in waiting:
                    yield name, work(name)
            return
        running: dict[Future[Result], str] = {}
        used = 0
        # OpenMP keeps its number of threads per calling thread.
        pool = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))
        with single_threaded(), pool:
            try:
                while waiting or running:
                    for name in list(waiting):
                        if len(running) >= self.workers:
                            break
                        if self.max_memory is None or used + memory.get(name, 0) <= self.max_memory:
                            waiting.remove(name)
                            used += memory.get(name, 0)
                            running[_submit(pool, work, name)] = name
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        name = running.pop(future)
                        used -= memory.get(name, 0)
                        yield name, future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ThreadPoolExecutor, work: Callable[[str], Result], name: str) -> Future[Result]:
    try:
        return pool.submit(work, name)
    except RuntimeError as error:
        raise MergestreamError("the system allows no more threads; use --workers 1, or raise ulimit -u") from error
