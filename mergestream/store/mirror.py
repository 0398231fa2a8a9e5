"""A store in a bucket, seen through a directory of this process: small files are fetched into it as they are asked for,
weights stay where they are and are read by range.

There is no lock. A commit puts the manifest in the place of the one that was read, and only there: of two writers one
wins. Every commit bears another mark, so that a manifest is never taken for an earlier one of the same content.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from uuid import uuid4

from mergestream.checkpoints.location import Location
from mergestream.errors import MergestreamError, StoreBusyError, UsageError, known_as
from mergestream.files import MAX_JSON_BYTES, local_path, read_json, sync_directory
from mergestream.objects import Bucket, Object, Url, in_background, url_of, wait_for

MANIFEST, PLAN, JOURNAL = "manifest.json", "plan.json", "journal"
SKETCH = "sketch.safetensors"
SCRATCH = "scratch"
"""A folder for those who only want to know"""
_PARTS = re.compile(r"\w+\.json|(steps|experts)/\d{4,}(-[0-9a-f]+)?/[\w.-]+")
"""What objects of a store are called; others are not looked at"""


class Mirror:
    """The place of a store in a bucket: its parts are found as if they were paths."""

    def __init__(self, url: Url) -> None:
        self.bucket = Bucket(url)
        self._temporary = TemporaryDirectory(prefix="mergestream-", ignore_cleanup_errors=True)
        self._directory = Path(self._temporary.name) / url.name
        self._directory.mkdir()
        self._folders: dict[str, dict[str, Object]] = {}
        """Of all objects, by the folder that they are in, as they were listed last"""
        self._fetched: dict[str, str] = {}
        """The tags of those that are here"""
        self._manifest: Object | None = None
        self._writing = False
        known_as(self._directory, str(url))

    def __str__(self) -> str:
        return str(self.bucket.url)

    def __reduce__(self) -> tuple[Any, ...]:
        return Mirror, (self.bucket.url,)

    def __truediv__(self, name: str) -> Path:
        """Where a part is, or would be, on this machine."""
        return self._directory / name

    @property
    def name(self) -> str:
        return self.bucket.url.name

    def refresh(self) -> None:
        """See what there is now, the manifest first: what belongs to it is there as long as it counts."""
        found = self.bucket.get(MANIFEST)
        if self._writing and self._manifest and (found is None or found[0].tag != self._manifest.tag):
            raise self._overtaken()
        self._manifest = found[0] if found else None
        if found:
            self._keep(*found)
        else:
            (self / MANIFEST).unlink(missing_ok=True)
        self.look()

    def look(self) -> None:
        """List all objects."""
        self._folders = {}
        for name, found in self.bucket.below("").items():
            if _PARTS.fullmatch(name):
                folder, _, last = name.rpartition("/")
                self._folders.setdefault(folder, {})[last] = found
        self._folders.get("", {}).pop(MANIFEST, None)  # which is what `refresh` has read

    def folders(self, kind: str) -> list[str]:
        """Those in ``steps`` or ``experts``."""
        return [folder.partition("/")[2] for folder in self._folders if folder.startswith(f"{kind}/")]

    def objects(self, folder: str) -> Mapping[str, Object]:
        return self._folders.get(folder, {})

    def fetched(self, name: str) -> Path:
        """The path of a file or a folder, with all that is in it but weights; nothing is there where there is none."""
        parent, _, last = name.rpartition("/")
        wanted = self.objects(name) or {key: found for key, found in self.objects(parent).items() if key == last}
        self._forget(name, wanted)
        small = [found for found in wanted.values() if not _is_weights(found) and self._is_new(found)]
        wait_for([in_background(self._fetch, found) for found in small])
        return self / name

    def _forget(self, name: str, there: Collection[str]) -> None:
        """What was fetched and is there no more."""
        if not there:
            shutil.rmtree(self / name, ignore_errors=True)
            (self / name).unlink(missing_ok=True)
        for path in (self / name).iterdir() if (self / name).is_dir() else ():
            if path.name not in there:
                path.unlink()

    def location(self, folder: str) -> Location:
        """A folder with its weights."""
        bucket = Bucket(self.bucket.url.below(folder))
        weights = {
            name: dataclasses.replace(found, folder=bucket, name=name)
            for name, found in self.objects(folder).items()
            if _is_weights(found)
        }
        return Location(self.fetched(folder), f"{self}/{folder}", weights)

    def _is_new(self, found: Object) -> bool:
        return self._fetched.get(found.name) != found.tag or not (self / found.name).exists()

    def _fetch(self, found: Object) -> None:
        if found.size > MAX_JSON_BYTES:
            raise MergestreamError(f"{found} is too large to be of a store; move it elsewhere")
        self._keep(found, found.read())

    def _keep(self, found: Object, content: bytes) -> None:
        path = self / found.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self._fetched[found.name] = found.tag

    # --- for a writer ----------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """From here on the manifest must stay the one that is read first, until it is replaced by ours."""
        self.bucket.refuse_without_conditions()
        self._manifest, self._writing = None, True
        try:
            yield
        except StoreBusyError:
            raise
        except MergestreamError:
            # A writer that has won may have removed what was being read.
            if self._manifest and not self.is_current():
                raise self._overtaken() from None
            raise
        finally:
            self._writing = False

    def is_current(self) -> bool:
        """Whether the manifest is still the one that was read, or put, last."""
        found = self.bucket.get(MANIFEST)
        return found is not None and self._manifest is not None and found[0].tag == self._manifest.tag

    def commit(self, text: str, new: bool) -> None:
        """Replace the manifest that was read; one that is to be ``new`` replaces none: FileExistsError."""
        try:
            self._manifest = self.bucket.put(MANIFEST, text.encode(), None if new else self._manifest)
        except FileExistsError:
            if new:
                raise
            raise self._overtaken() from None
        self._keep(self._manifest, text.encode())

    def _overtaken(self) -> StoreBusyError:
        return StoreBusyError(f"{self} was written to by another process meanwhile, which has won; run it again")

    def replace(self, name: str, text: str) -> None:
        """A file beside the manifest."""
        try:
            found = self.bucket.put(name, text.encode(), self.objects("").get(name))
        except FileExistsError:
            raise self._overtaken() from None
        self._folders.setdefault("", {})[name] = found

    def publish(self, folder: str) -> None:
        """Upload what was made here of a folder that is new."""
        for path in sorted((self / folder).iterdir()):
            self.bucket.upload(f"{folder}/{path.name}", path)
        self.look()
        self._fetched |= {found.name: found.tag for found in self.objects(folder).values()}

    def copy(self, folder: str, to: str) -> None:
        """The same objects in another folder, which is new."""
        for name in self.objects(folder):
            self.bucket.copy(f"{folder}/{name}", f"{to}/{name}")
        self.look()

    def plan(self, folder: str) -> Mapping[str, Any] | None:
        """What a step is to become, as long as it is being written."""
        if PLAN not in self.objects(f"steps/{folder}"):
            return None
        try:
            return read_json(self.fetched(f"steps/{folder}/{PLAN}"))
        except MergestreamError:  # it was removed just now, or is not whole
            return None

    def remove(self, folders: Collection[str]) -> None:
        """With all that is in them."""
        for folder in folders:
            self.bucket.delete(self.bucket.below(folder))
            self._folders.pop(folder, None)
            shutil.rmtree(self / folder, ignore_errors=True)


Place: TypeAlias = "Path | Mirror"
"""Where a store is"""


def place_of(path: str | Path | Mirror) -> Place:
    if isinstance(path, Mirror):
        return path
    url = url_of(path)
    if url is None:
        return local_path(path)
    if url.scheme == "hf":
        raise UsageError(f"{url} is on the hub, where stores are pushed to: mergestream pull {url} STORE fetches it")
    return Mirror(url)


def fetched(place: Place, name: str) -> Path:
    """The path of a part of a store, where it can be read."""
    return place.fetched(name) if isinstance(place, Mirror) else place / name


def located(place: Place, folder: str) -> Location:
    """A folder of a store, with its weights."""
    return place.location(folder) if isinstance(place, Mirror) else Location(place / folder, str(place / folder))


def has_folder(place: Place, folder: str) -> bool:
    return bool(place.objects(folder)) if isinstance(place, Mirror) else (place / folder).is_dir()


def publish(place: Place, folder: str) -> None:
    """Bring to where it counts what was written into a folder on this machine."""
    if isinstance(place, Mirror):
        place.publish(folder)
    else:
        sync_directory((place / folder).parent)


def occupied(place: Place) -> int:
    """The bytes of all that is there."""
    if isinstance(place, Mirror):
        return sum(found.size for found in place.bucket.below("").values())
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def new_mark(place: Place) -> str:
    """By which what is written differs from what others write at the same time; none on a disk, which has a lock."""
    return uuid4().hex[:16] if isinstance(place, Mirror) else ""


def _is_weights(found: Object) -> bool:
    return found.name.endswith(".safetensors") and not found.name.endswith(f"/{SKETCH}")
