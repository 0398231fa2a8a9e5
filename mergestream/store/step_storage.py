"""Steps that are being written: their plan, their journal, and how they are resumed.

A step in the making has a ``plan.json``, which says what it will become and which commit its writer has read. On a disk
it is written in place, and an interrupted one is continued. For a bucket it is written to a temporary directory and
uploaded when it is complete; an interrupted one is begun again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from mergestream.checkpoints import SafetensorsWriter, TensorSpec
from mergestream.digest import text_digest
from mergestream.errors import MergestreamError
from mergestream.files import to_json, write_error, write_json
from mergestream.storage import Storage

PLAN, JOURNAL = "plan.json", "journal"


class StepStorage:
    """The folder of one step while it is being written."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._name, self._folder = storage, folder, f"steps/{folder}"
        self._temporary = ExitStack()
        self._draft = storage.path(self._folder) or self._temporary.enter_context(storage.workspace())

    def begin(self, plan: Mapping[str, Any], *, resumable: bool) -> bool:
        """Write the plan; returns whether an interrupted run with the same plan is continued."""
        if resumable and self._storage.has_lock and read_plan(self._storage, self._name) == plan:
            return True
        self._storage.remove(self._folder)
        self._storage.put_if(f"{self._folder}/{PLAN}", to_json(plan).encode(), None)
        return False

    def open_writer(
        self, layout: Mapping[str, TensorSpec], stem: str = "model", *, resume: bool = False
    ) -> SafetensorsWriter:
        """A writer of tensors to the file ``stem``, or to shards of it."""
        return SafetensorsWriter(self._draft, layout, prefix=stem, resume=resume)

    def read_journal(self) -> Iterator[dict[str, Any]]:
        """The complete lines of the journal, each of which follows its digest."""
        with suppress(FileNotFoundError):
            for line in (self._draft / JOURNAL).read_text(encoding="utf-8", errors="replace").splitlines():
                digest, _, text = line.partition(" ")
                if digest == text_digest(text):
                    yield json.loads(text)

    def record(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the journal, if the step can be resumed."""
        if not self._storage.has_lock:
            return
        text, path = json.dumps(entry), self._draft / JOURNAL
        try:
            with path.open("ab", buffering=0) as file:
                file.write(f"\n{text_digest(text)} {text}".encode())
        except OSError as error:
            raise write_error(path, error) from error

    def save(self, name: str, data: Any) -> None:
        """Write a JSON file."""
        write_json(self._draft / name, data)

    def take_over(self, previous: str, stem: str) -> None:
        """Link or copy the safetensors file ``stem`` of another step, or its shards."""
        for name in _files_of(stem, self._storage.files(f"steps/{previous}")):
            self._storage.copy(f"steps/{previous}/{name}", f"{self._folder}/{name}")

    def drop(self, stem: str) -> None:
        """Delete the safetensors file ``stem``, or its shards."""
        for name in _files_of(stem, [path.name for path in self._draft.iterdir()]):
            (self._draft / name).unlink()

    def finish(self) -> None:
        """Make the folder durable, or upload it."""
        self._storage.publish(self._draft, self._folder)
        self._temporary.close()

    def close(self) -> None:
        """Remove temporary files; on a disk the step can be resumed."""
        self._temporary.close()

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


def _files_of(stem: str, names: Collection[str]) -> list[str]:
    return [name for name in names if name.startswith((f"{stem}-", f"{stem}."))]
