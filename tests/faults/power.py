"""What a power cut leaves of the changes that a process has made: what was flushed, and any part of the rest.

A file's bytes are there once the file is flushed, a name once the directory that it is in is. A rename is one change of
both its directories. What is not flushed may be there or not, whatever the order in which it was done.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.shim import Call

VARIANTS = ("flushed", "names", "bytes", "first names", "some")
"""What is there of that which was not flushed: nothing; all names and no bytes; all bytes and no names; the names up to
some point, as with a journal; or any part of either."""


@dataclass(eq=False)
class Node:
    """A file with its bytes, or a directory with its names."""

    data: bytearray | None = None
    names: dict[str, Node] = field(default_factory=dict)

    def write(self, offset: int, data: bytes) -> None:
        assert self.data is not None
        self.data.extend(bytes(max(0, offset - len(self.data))))
        self.data[offset : offset + len(data)] = data

    def resize(self, size: int) -> None:
        assert self.data is not None
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))


@dataclass(frozen=True)
class Change:
    """One that a power cut may undo: of the bytes of a file, or of names in some directories."""

    touches: tuple[Node, ...]
    apply: Callable[[dict[Node, Node]], object]
    """To the copies of all nodes that make up the disk"""
    of_names: bool


def loaded(directory: Path) -> Node:
    """What is on the disk, all of it flushed long ago; files with several names are one node."""
    known: dict[int, Node] = {}

    def load(path: Path) -> Node:
        if path.is_dir():
            return Node(names={child.name: load(child) for child in path.iterdir()})
        return known.setdefault(path.stat().st_ino, Node(bytearray(path.read_bytes())))

    return load(directory)


def saved(node: Node, place: Path) -> None:
    written: dict[Node, Path] = {}

    def save(node: Node, path: Path) -> None:
        if node.data is None:
            path.mkdir()
            for name, child in node.names.items():
                save(child, path / name)
        elif node in written:
            os.link(written[node], path)
        else:
            path.write_bytes(node.data)
            written[node] = path

    save(node, place)


class Disk:
    """Replays the calls of a process on the nodes of a directory; tells what each of them has changed and flushed."""

    def __init__(self, root: Path, start: Node) -> None:
        self.root, self.top = str(root), start
        self.nodes: list[Node] = list(_all_nodes(start))
        self._files: dict[int, Node | None] = {}

    def play(self, call: Call) -> Change | Node | None:
        """Do what a call did: the change, or the node that was flushed."""
        name, arguments = call
        if name == "open":
            return self._open(*arguments)
        if name in ("write", "posix_fallocate", "ftruncate", "fsync", "fdatasync"):
            node = self._files.get(arguments[0])
            if node is None or "sync" in name:
                return node
            return self._change_bytes(node, name, arguments[1:])
        return self._change_names(name, *arguments)

    def _open(self, descriptor: int, path: str, flags: int) -> Change | None:
        found = self._find(path)
        if not found:
            self._files[descriptor] = None
            return None
        parent, name = found
        existing = self.top if path == self.root else parent.names.get(name)
        if existing:
            self._files[descriptor] = existing
            return self._change_bytes(existing, "ftruncate", (0,)) if flags & os.O_TRUNC else None
        new = Node(bytearray())
        self.nodes.append(new)
        self._files[descriptor] = new
        return self._done((parent,), lambda at: at[parent].names.__setitem__(name, at[new]), True)

    def _change_bytes(self, node: Node, name: str, arguments: Sequence[Any]) -> Change:
        if name == "write":
            offset, data = arguments
            return self._done((node,), lambda at: at[node].write(offset, data), False)
        size = sum(arguments) if name == "posix_fallocate" else arguments[0]
        if name == "posix_fallocate":
            return self._done((node,), lambda at: at[node].resize(max(size, len(at[node].data or b""))), False)
        return self._done((node,), lambda at: at[node].resize(size), False)

    def _change_names(self, name: str, path: str, other: str = "") -> Change | None:
        found = self._find(path)
        if not found:
            return None
        place, child = found
        if name in ("unlink", "remove", "rmdir"):
            return self._done((place,), lambda at: at[place].names.pop(child, None), True)
        if name == "mkdir":
            new = Node()
            self.nodes.append(new)
            return self._done((place,), lambda at: at[place].names.__setitem__(child, at[new]), True)
        target, new_name = self._find(other) or (place, child)
        node = place.names[child]

        def link(at: dict[Node, Node]) -> None:
            at[target].names[new_name] = at[node]

        def move(at: dict[Node, Node]) -> None:
            if at[place].names.get(child) is at[node]:
                del at[place].names[child]
            link(at)

        replaced = target.names.get(new_name)

        def exchange(at: dict[Node, Node]) -> None:
            link(at)
            assert replaced is not None
            at[place].names[child] = at[replaced]

        act = {"link": link, "exchange": exchange}.get(name, move)
        return self._done((place, target), act, True)

    def _done(self, touches: tuple[Node, ...], apply: Callable[[dict[Node, Node]], object], of_names: bool) -> Change:
        change = Change(touches, apply, of_names)
        change.apply({node: node for node in self.nodes})
        return change

    def _find(self, path: str) -> tuple[Node, str] | None:
        """The directory of a path and its last part; None where it is not below the root."""
        if path != self.root and not path.startswith(f"{self.root}/"):
            return None
        *parents, name = ("", *os.path.relpath(path, self.root).split("/"))
        node = self.top
        for part in parents[1:]:
            node = node.names[part]
        return node, name


def _all_nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.names.values():
        yield from _all_nodes(child)


def after_cut(start: Path, root: Path, calls: Sequence[Call], variant: str, seed: int) -> Node:
    """The disk of a process that had made these calls below ``root`` when the power went."""
    top = loaded(start)
    original = _copied(top, list(_all_nodes(top)))
    disk = Disk(root, top)
    begun = list(disk.nodes)
    changes: list[Change] = []
    flushed: set[int] = set()
    for call in calls:
        done = disk.play(call)
        if isinstance(done, Change):
            changes.append(done)
        elif isinstance(done, Node):
            flushed |= {i for i, change in enumerate(changes) if done in change.touches}
    surviving = flushed | _lucky(changes, flushed, variant, random.Random(seed))
    at = {node: original[node] for node in begun}
    at |= {node: Node(None if node.data is None else bytearray()) for node in disk.nodes if node not in at}
    for number, change in enumerate(changes):
        if number in surviving:
            change.apply(at)
    return at[top]


def _copied(top: Node, nodes: Sequence[Node]) -> dict[Node, Node]:
    copies = {node: Node(None if node.data is None else bytearray(node.data)) for node in nodes}
    for node in nodes:
        copies[node].names = {name: copies[child] for name, child in node.names.items()}
    return copies


def _lucky(changes: Sequence[Change], flushed: set[int], variant: str, dice: random.Random) -> set[int]:
    """Which of the changes that were not flushed have reached the disk nevertheless."""
    rest = [number for number in range(len(changes)) if number not in flushed]
    names = [number for number in rest if changes[number].of_names]
    if variant == "flushed":
        return set()
    if variant == "names":
        return set(names)
    if variant == "bytes":
        return set(rest) - set(names)
    if variant == "first names":
        return set(names[: dice.randint(0, len(names))])
    return {number for number in rest if dice.random() < 0.5}
