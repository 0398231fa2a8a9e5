"""One writer at a time. The operating system drops the lock when its holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mergestream.errors import MergestreamError, StoreBusyError
from mergestream.store.mirror import Mirror, Place

NAME = "lock"


@contextmanager
def writing_to(store: Place) -> Iterator[None]:
    """Be the one writer: by a lock on a disk, and by the commit in a bucket."""
    with store.writing() if isinstance(store, Mirror) else writer_lock(store):
        yield


@contextmanager
def writer_lock(store: Path) -> Iterator[None]:
    """Hold the store for writing, or fail at once with who holds it."""
    try:
        descriptor = os.open(store / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise MergestreamError(f"{store} cannot be written to: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            raise StoreBusyError(
                f"{store} is being written to by another process{f' ({holder})' if holder else ''}; "
                "wait until it is done"
            ) from None
        # Who holds it is a courtesy to others: on a full disk the step itself says what is the matter.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)
