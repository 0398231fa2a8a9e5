"""Where a step is written before it counts, so that one that was cut short can be resumed.

On a disk it is the directory itself: files are written in place, and continued there. In a bucket it is a folder that
no other writer has a part in: who resumes a step takes over copies of the objects that are whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from mergestream.checkpoints import SafetensorsWriter, TensorSpec
from mergestream.checkpoints.safetensors import SafetensorsObject
from mergestream.checkpoints.uploading import SafetensorsUploader
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE, TensorWriter
from mergestream.digest import text_digest
from mergestream.errors import MergestreamError
from mergestream.files import read_json, remove, sync_directory, to_json, write_error, write_json
from mergestream.objects import Bucket, in_background, wait_for
from mergestream.store.mirror import JOURNAL, PLAN, Mirror, Place


class Site(Protocol):
    """A step in the making."""

    def begin(self, plan: Mapping[str, Any], resumable: bool) -> bool:
        """Whether something is left of an earlier run by the same plan; else all is new."""

    def claim(self, commit: str) -> None:
        """Begin what is never resumed, after the commit that was read."""

    def writer(self, layout: Mapping[str, TensorSpec], prefix: str, resume: bool, shards: bool = True) -> TensorWriter:
        """Writes tensors; ``shards`` says whether to several files."""

    def entries(self) -> Iterator[dict[str, Any]]:
        """What the journal of the earlier run tells, as far as it is whole."""

    def record(self, entry: Mapping[str, Any], written: int) -> None:
        """Add to the journal; so many tensors are where they are to be."""

    def save(self, name: str, data: Any) -> None:
        """A file of JSON."""

    def take_over(self, previous: str, prefix: str) -> None:
        """Have the same tensors as another step, in the folder of which they are."""

    def drop(self, prefix: str) -> None:
        """Tensors that nobody needs after all."""

    def finish(self) -> None:
        """All of it is durable now, and can be read."""

    def close(self) -> None:
        """Let go of it as it is."""

    def remove(self) -> None: ...


def site_of(store: Place, folder: str) -> Site:
    return BucketSite(store, folder) if isinstance(store, Mirror) else DiskSite(store / "steps" / folder)


class DiskSite:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._journal: BinaryIO | None = None

    def begin(self, plan: Mapping[str, Any], resumable: bool) -> bool:
        found = False
        if resumable:
            with suppress(MergestreamError):  # there is no plan, or none that can be read
                found = read_json(self._directory / PLAN) == plan
        if not found:
            remove(self._directory)
            self._directory.mkdir(parents=True)
            self.save(PLAN, plan)
        return found

    def claim(self, commit: str) -> None:
        remove(self._directory)

    def writer(self, layout: Mapping[str, TensorSpec], prefix: str, resume: bool, shards: bool = True) -> TensorWriter:
        most = DEFAULT_SHARD_SIZE if shards else 2**62
        return SafetensorsWriter(self._directory, layout, prefix=prefix, max_shard_size=most, resume=resume)

    def entries(self) -> Iterator[dict[str, Any]]:
        path = self._directory / JOURNAL
        if path.is_file():
            yield from _whole_entries(path.read_bytes())

    def record(self, entry: Mapping[str, Any], written: int) -> None:
        path = self._directory / JOURNAL
        try:
            self._journal = self._journal or path.open("ab", buffering=0)
            self._journal.write(_line(entry))
        except OSError as error:
            raise write_error(path, error) from error

    def save(self, name: str, data: Any) -> None:
        write_json(self._directory / name, data)

    def take_over(self, previous: str, prefix: str) -> None:
        name = f"{prefix}.safetensors"
        link(self._directory.with_name(previous) / name, self._directory / name)

    def drop(self, prefix: str) -> None:
        (self._directory / f"{prefix}.safetensors").unlink(missing_ok=True)

    def finish(self) -> None:
        sync_directory(self._directory.parent)

    def close(self) -> None:
        if self._journal:
            self._journal.close()

    def remove(self) -> None:
        self.close()
        with suppress(OSError):  # why it is abandoned is what counts; the next writer tries again
            remove(self._directory)


class BucketSite:
    def __init__(self, store: Mirror, folder: str) -> None:
        self._store, self._folder = store, f"steps/{folder}"
        self._bucket = Bucket(store.bucket.url.below(self._folder))
        self._lines: list[bytes] = []
        self._put = self._written = 0

    def begin(self, plan: Mapping[str, Any], resumable: bool) -> bool:
        earlier = self._earlier(plan) if resumable else None
        self.save(PLAN, plan)  # first, for a folder without is nobody's
        if earlier is None:
            return False
        self._lines = [self._store.fetched(f"{earlier}/{name}").read_bytes() for name in self._journals(earlier)]
        wait_for(
            in_background(self._copy, earlier, name)
            for name in self._store.objects(earlier)
            if name.endswith(".safetensors")
        )
        self._store.look()
        return True

    def claim(self, commit: str) -> None:
        self.save(PLAN, {"commit": commit})

    def _earlier(self, plan: Mapping[str, Any]) -> str | None:
        """The folder of a run by the same plan, which has lost, failed or was killed."""
        same = {**plan, "commit": None}
        for folder in self._store.folders("steps"):
            found = self._store.plan(folder)
            if found is not None and {**found, "commit": None} == same:
                return f"steps/{folder}"
        return None

    def _journals(self, folder: str) -> list[str]:
        return [name for name in self._store.objects(folder) if name.startswith(JOURNAL)]

    def _copy(self, earlier: str, name: str) -> None:
        with suppress(MergestreamError):  # it is gone, or too large to be copied: then it is written once more
            self._store.bucket.copy(f"{earlier}/{name}", f"{self._folder}/{name}")

    def writer(self, layout: Mapping[str, TensorSpec], prefix: str, resume: bool, shards: bool = True) -> TensorWriter:
        found = {}
        for name, item in self._store.objects(self._folder).items() if resume else ():
            if name.startswith(f"{prefix}-") and name.endswith(".safetensors"):
                for tensor, info in SafetensorsObject(item).tensors.items():
                    if layout.get(tensor) == TensorSpec(info.dtype, info.shape):
                        found[tensor] = name
        return SafetensorsUploader(self._bucket, layout, prefix=prefix, found=found if resume else None)

    def entries(self) -> Iterator[dict[str, Any]]:
        for lines in list(self._lines):
            yield from _whole_entries(lines)

    def record(self, entry: Mapping[str, Any], written: int) -> None:
        """It is put when more tensors have been, for before that it would tell nothing."""
        self._lines.append(_line(entry))
        if written > self._written:
            self._written = written
            self._put_journal()

    def _put_journal(self) -> None:
        if self._lines:
            self._put += 1
            self._bucket.upload(f"{JOURNAL}-{self._put:05d}", b"".join(self._lines))
            self._lines.clear()

    def save(self, name: str, data: Any) -> None:
        self._bucket.upload(name, to_json(data).encode())

    def take_over(self, previous: str, prefix: str) -> None:
        there = f"steps/{previous}"
        for name in self._store.objects(there):
            if name.startswith((f"{prefix}-", f"{prefix}.")):
                self._store.bucket.copy(f"{there}/{name}", f"{self._folder}/{name}")

    def drop(self, prefix: str) -> None:
        self._bucket.delete(name for name in self._bucket.below("") if name.startswith((f"{prefix}-", f"{prefix}.")))

    def finish(self) -> None:
        self._store.look()

    def close(self) -> None:
        with suppress(MergestreamError):  # then a few tensors are done once more
            self._put_journal()

    def remove(self) -> None:
        with suppress(MergestreamError):  # why it is abandoned is what counts; the next writer tries again
            self._store.remove([self._folder])


def link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def _line(entry: Mapping[str, Any]) -> bytes:
    text = json.dumps(entry)
    return f"\n{text_digest(text)} {text}".encode()


def _whole_entries(journal: bytes) -> Iterator[dict[str, Any]]:
    """The journal's lines, each after its digest: one that was cut short does not count."""
    for line in journal.decode(errors="replace").splitlines():
        digest, _, text = line.partition(" ")
        if digest == text_digest(text):
            yield json.loads(text)
