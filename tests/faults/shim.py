"""A disk that fails on request: every call of this process that reads or changes a file below one directory goes
through here, is counted and noted, and one of them fails, is cut short, or is the last that the process makes.

It is Python's own: ``os`` is patched, and ``open`` is the one of ``_pyio``, written in Python on top of ``os``.
An audit hook makes sure that nothing is changed behind its back. It is meant for a forked child: nothing takes it off.
"""

from __future__ import annotations

import _pyio
import builtins
import errno
import io
import mmap
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mergestream.files

KINDS = {
    "open": "open",
    "write": "write",
    "pwrite": "write",
    "fsync": "fsync",
    "fdatasync": "fsync",
    "rename": "rename",
    "replace": "rename",
    "link": "link",
    "symlink": "link",
    "unlink": "unlink",
    "remove": "unlink",
    "rmdir": "unlink",
    "mkdir": "mkdir",
    "ftruncate": "truncate",
    "truncate": "truncate",
    "posix_fallocate": "allocate",
    "read": "read",
    "pread": "read",
    "listdir": "read",
    "scandir": "read",
}
"""The calls that are patched, and what kind each of them is; a file that is only opened to be read is a read."""

WAYS = {
    "open": ("EIO", "ENOSPC", "kill", "full"),
    "write": ("EIO", "ENOSPC", "kill", "full", "torn", "short"),
    "fsync": ("EIO", "ENOSPC", "kill"),
    "rename": ("EIO", "ENOSPC", "kill", "full"),
    "link": ("EIO", "ENOSPC", "EMLINK", "kill", "full"),
    "unlink": ("EIO", "kill"),
    "mkdir": ("EIO", "ENOSPC", "kill", "full"),
    "truncate": ("EIO", "ENOSPC", "kill", "full"),
    "allocate": ("EIO", "ENOSPC", "EOPNOTSUPP", "kill", "full"),
    "exchange": ("cannot", "kill"),
    "read": ("EIO",),
}
"""How a call of each kind can fail. ``torn`` is a kill after half of a write, ``short`` a write that takes half of its
bytes and says so; ``cannot`` is a system without such a call; ``full`` is a disk that is full from there on, for as
long as the process lives."""
SIGNALS = ("SIGINT", "SIGTERM")
"""A fault can also be a signal that arrives with a call, which is done"""

_TAKES_ROOM = {"open", "write", "link", "mkdir", "truncate", "allocate", "rename"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_AUDITED = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


class Call(NamedTuple):
    """One that has succeeded: a path is absolute, a file is known by its descriptor."""

    name: str
    arguments: tuple[Any, ...]

    @property
    def kind(self) -> str:
        if self.name == "open":
            return "open" if self.arguments[2] & _WRITES else "read"
        return "read" if self.name == "mmap" else KINDS.get(self.name, self.name)


@dataclass(frozen=True)
class Fault:
    """What happens at the n-th change of the disk, or at its n-th read."""

    number: int
    way: str
    reads: bool = False

    def __str__(self) -> str:
        return f"{self.way} at {'read' if self.reads else 'change'} {self.number}"


@dataclass
class Shim:
    """What becomes of the calls of this process below ``root``, from ``install`` on."""

    root: Path
    inputs: Path | None = None
    """What else is read"""
    fault: Fault | None = None
    room: int | None = None
    """How many bytes all files below the root may take together"""
    exchanges: bool = True
    """Whether the system lets two names change places"""
    calls: list[Call] = field(default_factory=list)
    """The changes that have succeeded, and which files were opened, in order"""
    counted: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    """How many changes there were, and how many reads"""
    kinds: list[str] = field(default_factory=list)
    """Of each change"""
    most_taken: int = 0
    """Bytes below the root, where there is a bound on them"""
    _files: dict[int, str] = field(default_factory=dict)
    _originals: dict[str, Callable[..., Any]] = field(default_factory=dict)
    _full: bool = False
    _inside: bool = False

    def __post_init__(self) -> None:
        self.root = Path(os.path.realpath(self.root))

    def install(self) -> None:
        special = {"open": self._open, "write": self._write, "pwrite": self._pwrite, "close": self._close}
        for name in (*KINDS, "close"):
            # What is written stays in the page cache: a power cut is simulated (power.py), and real flushes are slow.
            self._originals[name] = os.fstat if KINDS.get(name) == "fsync" else getattr(os, name)
            setattr(os, name, special.get(name) or self._patched(name))
        self._originals["mmap"] = mmap.mmap
        mmap.mmap = self._mmap  # type: ignore[misc, assignment]
        self._originals["exchange"] = mergestream.files._exchange_at_once
        mergestream.files._exchange_at_once = self._exchange
        io.open = builtins.open = _pyio.open
        shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
        sys.addaudithook(self._refuse_bypass)

    # --- the calls ------------------------------------------------------------------------------------------

    def _patched(self, name: str) -> Callable[..., Any]:
        original = self._originals[name]
        paths = 2 if KINDS[name] in {"rename", "link"} else 1

        def call(*arguments: Any, **options: Any) -> Any:
            if arguments and isinstance(arguments[0], int):
                noted: tuple[Any, ...] = arguments if arguments[0] in self._files else ()
            else:
                directory = options.get("dir_fd", options.get("src_dir_fd"))
                noted = tuple(self._path(path, directory) for path in (arguments or (".",))[:paths])
                noted = noted if self._is_ours(noted[-1]) else ()
            if not noted:
                return original(*arguments, **options)
            return self._do(name, noted, lambda: original(*arguments, **options))

        return call

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        absolute = self._path(path, dir_fd)

        def act() -> int:
            return int(self._originals["open"](path, flags, mode, dir_fd=dir_fd))

        if not self._is_ours(absolute):
            return act()
        descriptor = int(self._do("open", (None, absolute, flags), act))
        self._files[descriptor] = absolute
        self.calls[-1] = Call("open", (descriptor, absolute, flags))
        return descriptor

    def _write(self, descriptor: int, data: Any) -> int:
        return self._write_at(descriptor, data, None)

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        return self._write_at(descriptor, data, offset)

    def _write_at(self, descriptor: int, data: Any, offset: int | None) -> int:
        def write(part: Any) -> int:
            if offset is None:
                return int(self._originals["write"](descriptor, part))
            return int(self._originals["pwrite"](descriptor, part, offset))

        if descriptor not in self._files:
            return write(data)
        whole = memoryview(bytes(data))  # a copy: one's own buffer cannot be resized while an error holds a view of it
        fitting = self._fitting(descriptor, whole, offset)
        count: int = self._do("write", (descriptor,), lambda: write(fitting), lambda: write(whole[: len(whole) // 2]))
        position = os.lseek(descriptor, 0, os.SEEK_CUR) - count if offset is None else offset
        self.calls[-1] = Call("write", (descriptor, position, bytes(whole[:count])))
        return count

    def _mmap(self, descriptor: int, *arguments: Any, **options: Any) -> Any:
        def act() -> Any:
            return self._originals["mmap"](descriptor, *arguments, **options)

        return self._do("mmap", (descriptor,), act) if descriptor in self._files else act()

    def _exchange(self, one: Path, other: Path) -> bool:
        """Two names that change places, for which ``os`` has no call."""
        names = self._path(one), self._path(other)
        return self.exchanges and bool(self._do("exchange", names, lambda: self._originals["exchange"](one, other)))

    def _close(self, descriptor: int) -> None:
        self._files.pop(descriptor, None)
        self._originals["close"](descriptor)

    # --- counting, failing, noting --------------------------------------------------------------------------

    def _do(
        self, name: str, arguments: tuple[Any, ...], act: Callable[[], Any], half: Callable[[], Any] | None = None
    ) -> Any:
        if self._inside:
            return act()
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the order of calls is that of one thread: run commands with --workers 1")
        call = Call(name, arguments)
        reads = call.kind == "read"
        self.counted[reads] += 1
        if not reads:
            self.kinds.append(call.kind)
        with self._own():
            if self.fault and self.fault.reads == reads and self.fault.number == self.counted[reads]:
                result = self._fail(call, self.fault.way, act, half)
            elif (self._full and call.kind in _TAKES_ROOM) or self._lacks_room(call):
                raise _error("ENOSPC", call)
            else:
                result = act()
        if (not reads or name == "open") and result is not False:
            self.calls.append(call)
        return result

    def _fail(self, call: Call, way: str, act: Callable[[], Any], half: Callable[[], Any] | None) -> Any:
        if way in SIGNALS:
            os.kill(os.getpid(), getattr(signal, way))
            return act()
        if way == "cannot":
            return False
        if way == "short" and half:
            return half()
        if way == "torn" and half:
            half()
        if way in {"kill", "torn"}:
            os.kill(os.getpid(), signal.SIGKILL)
        self._full = way == "full"
        raise _error("ENOSPC" if way == "full" else way, call)

    def _fitting(self, descriptor: int, data: memoryview, offset: int | None) -> memoryview:
        """As much of a write as there is room for; all of it where there is none, to fail."""
        if self.room is None:
            return data
        start = os.lseek(descriptor, 0, os.SEEK_CUR) if offset is None else offset
        growth = max(0, start + len(data) - os.fstat(descriptor).st_size)
        with self._own():
            missing = growth - (self.room - taken(self.root))
        return data[: len(data) - missing] if 0 < missing < len(data) else data

    def _lacks_room(self, call: Call) -> bool:
        """Whether the disk is full; names and holes take no room."""
        if self.room is None or call.kind not in {"write", "allocate"}:
            return False
        growth = 1
        if call.kind == "allocate":
            descriptor, offset, size = call.arguments
            growth = max(0, offset + size - os.fstat(descriptor).st_size)
        self.most_taken = max(self.most_taken, taken(self.root) + growth)
        return growth > 0 and taken(self.root) + growth > self.room

    def _is_ours(self, path: str) -> bool:
        return f"{path}/".startswith((f"{self.root}/", f"{self.inputs}/"))

    def _path(self, path: Any, directory: int | None = None) -> str:
        place = self._files.get(directory, "") if directory is not None else ""
        return os.path.normpath(Path.cwd() / place / os.fsdecode(path))  # links are not followed

    @contextmanager
    def _own(self) -> Iterator[None]:
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _refuse_bypass(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._inside or event not in {"open", *_AUDITED}:
            return
        changes = event != "open" or bool((arguments[2] or 0) & _WRITES)
        if changes and isinstance(arguments[0], str | bytes | os.PathLike) and self._is_ours(self._path(arguments[0])):
            raise RuntimeError(f"the shim was bypassed: {event} {arguments}")


def _error(name: str, call: Call) -> OSError:
    number = getattr(errno, name)
    paths = [argument for argument in call.arguments if isinstance(argument, str)]
    return OSError(number, os.strerror(number), *paths[:1])


def taken(root: Path) -> int:
    """The bytes of all files below a directory, each counted once however many names it has."""
    sizes = {}
    for directory, _, names in os.walk(root):
        for name in names:
            found = os.lstat(f"{directory}/{name}")
            sizes[found.st_ino] = found.st_size
    return sum(sizes.values())
