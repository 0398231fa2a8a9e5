"""Steps that are being written: their plan, their journal, how they are resumed, and what is cleaned up.

A step in the making has a ``plan.json``, which says what it will become and which commit its writer has read. Local
files are continued in place. In a bucket every writer has a folder of its own, and copies the complete objects of an
interrupted run with the same plan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from mergestream.checkpoints import TensorSpec
from mergestream.checkpoints.uploading import open_writer
from mergestream.checkpoints.writer import TensorWriter
from mergestream.digest import text_digest
from mergestream.errors import MergestreamError
from mergestream.files import to_json
from mergestream.storage import Storage
from mergestream.storage.transfer import start, wait_all
from mergestream.store.manifest import Manifest, folder_name

PLAN, JOURNAL = "plan.json", "journal"
_FOLDER = re.compile(r"\d{4,}(-[0-9a-f]+)?")


class StepStorage:
    """The folder of one step while it is being written."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, f"steps/{folder}"
        self._lines: list[bytes] = []
        self._durable = 0

    def begin(self, plan: Mapping[str, Any], *, resumable: bool) -> bool:
        """Write the plan, and take over what an interrupted run with the same plan has left; returns whether it has."""
        earlier = self._find_earlier(plan) if resumable else None
        if earlier == self._folder:
            return True
        self._storage.remove(self._folder)
        self.save(PLAN, plan)
        if earlier is None:
            return False
        names = [name for name in self._storage.files(earlier) if name.endswith(".safetensors") or is_journal(name)]
        wait_all(start(self._copy, earlier, name) for name in names)
        return True

    def _find_earlier(self, plan: Mapping[str, Any]) -> str | None:
        """The folder of an interrupted run with the same plan; with a lock only this one is written to."""
        own = self._folder.partition("/")[2]
        for folder in [own] if self._storage.has_lock else self._storage.folders("steps"):
            if _without_commit(read_plan(self._storage, folder) or {}) == _without_commit(plan):
                return f"steps/{folder}"
        return None

    def _copy(self, earlier: str, name: str) -> None:
        with suppress(MergestreamError):  # it is gone, or too large to be copied: then it is written again
            self._storage.copy(f"{earlier}/{name}", f"{self._folder}/{name}")

    def claim(self, commit: str) -> None:
        """Begin a folder that is never resumed, after reading the commit."""
        self._storage.remove(self._folder)
        self.save(PLAN, {"commit": commit})

    def open_writer(
        self, layout: Mapping[str, TensorSpec], stem: str = "model", *, resume: bool = False, one_file: bool = False
    ) -> TensorWriter:
        """A writer of tensors; locally into one file if ``one_file`` says so, else into shards."""
        return open_writer(self._storage, self._folder, layout, stem, resume=resume, one_file=one_file)

    def read_journal(self) -> Iterator[dict[str, Any]]:
        """The complete lines of the journal, each of which follows its digest."""
        for name in filter(is_journal, self._storage.files(self._folder)):
            data = self._storage.read(f"{self._folder}/{name}") or b""
            for line in data.decode(errors="replace").splitlines():
                digest, _, text = line.partition(" ")
                if digest == text_digest(text):
                    yield json.loads(text)

    def record(self, entry: Mapping[str, Any], durable: int) -> None:
        """Add a line to the journal. It is written once ``durable``, the number of tensors that are safe, grows."""
        text = json.dumps(entry)
        self._lines.append(f"\n{text_digest(text)} {text}".encode())
        if durable > self._durable:
            self._durable = durable
            self._write_journal()

    def _write_journal(self) -> None:
        if self._lines:
            self._storage.append(f"{self._folder}/{JOURNAL}", b"".join(self._lines))
            self._lines.clear()

    def save(self, name: str, data: Any) -> None:
        """Write a JSON file."""
        self._storage.put(f"{self._folder}/{name}", to_json(data).encode())

    def take_over(self, previous: str, stem: str) -> None:
        """Link or copy the safetensors file ``stem`` of another step, or its shards."""
        for name in _files_of(stem, self._storage.files(f"steps/{previous}")):
            self._storage.copy(f"steps/{previous}/{name}", f"{self._folder}/{name}")

    def drop(self, stem: str) -> None:
        """Delete the safetensors file ``stem``, or its shards."""
        self._storage.delete(f"{self._folder}/{name}" for name in _files_of(stem, self._storage.files(self._folder)))

    def finish(self) -> None:
        """Make the folder durable."""
        self._storage.sync("steps")

    def close(self) -> None:
        """Write the rest of the journal; the step can be resumed."""
        with suppress(MergestreamError):  # a few tensors are done again
            self._write_journal()

    def remove(self) -> None:
        """Delete the folder. A failure is ignored: the next writer cleans up."""
        self.close()
        with suppress(OSError, MergestreamError):
            self._storage.remove(self._folder)


def read_plan(storage: Storage, folder: str) -> dict[str, Any] | None:
    """The plan of a step that is being written; None if there is none, or none that can be read."""
    try:
        found = json.loads(storage.read(f"steps/{folder}/{PLAN}") or b"null")
    except (MergestreamError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_journal(name: str) -> bool:
    """Whether a file of a step belongs to its journal."""
    return name.startswith(JOURNAL)


def clean_up(storage: Storage, manifest: Manifest, kept: Collection[str], replaced: str | None) -> None:
    """Remove all folders that the manifest does not need, except steps that can still be resumed or committed.

    ``kept`` are the folders in ``steps`` that stay. ``replaced`` is the commit that the present one has replaced: steps
    that were begun after another commit are removed. None keeps every step that can be resumed.
    """
    storage.sync()  # first: after a power cut the previous manifest may be back, and needs its steps
    left = {folder: read_plan(storage, folder) for folder in _numbered(storage, "steps") if folder not in kept}
    if storage.has_lock:  # nobody else is writing
        following = folder_name(manifest.next_number, "")
        plan = left.get(following)
        spared = {following} if replaced is None and plan and "after" in plan else set()
    else:
        spared = _resumable(storage, manifest, kept, left, replaced)
        if not storage.is_current(manifest.version):  # checked last: whoever has read this manifest has a plan by now
            return
    for folder in left.keys() - spared:
        storage.remove(f"steps/{folder}")
    for folder in kept:
        names = [name for name in storage.files(f"steps/{folder}") if name == PLAN or is_journal(name)]
        storage.delete(f"steps/{folder}/{name}" for name in names)
    experts = {entry.folder for entry in manifest.history} | spared
    for folder in _numbered(storage, "experts"):
        if folder not in experts:
            storage.remove(f"experts/{folder}")
    if storage.has_lock:
        storage.clean_scratch()


def _resumable(
    storage: Storage,
    manifest: Manifest,
    kept: Collection[str],
    left: Mapping[str, Mapping[str, Any] | None],
    replaced: str | None,
) -> set[str]:
    """The steps whose writers have read this manifest and may commit, or that a writer may resume."""
    done = [_without_commit(plan) for folder in kept if (plan := read_plan(storage, folder))]
    after = None, [entry.digest for entry in manifest.history]
    found = set()
    for folder, begun in left.items():
        if begun is None:
            continue
        can_resume = begun.get("after", ()) in after and replaced in (None, begun.get("commit"))
        if begun.get("commit") == manifest.commit or (can_resume and _without_commit(begun) not in done):
            found.add(folder)
    return found


def _without_commit(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {**plan, "commit": None}


def _numbered(storage: Storage, kind: str) -> list[str]:
    return [folder for folder in storage.folders(kind) if _FOLDER.fullmatch(folder)]


def _files_of(stem: str, names: Collection[str]) -> list[str]:
    return [name for name in names if name.startswith((f"{stem}-", f"{stem}."))]
