"""`BucketStorage`: a folder in a bucket of S3, Google Cloud Storage or Azure, through obstore.

There is no lock. Writers run side by side, and a commit is a compare-and-swap of one object: the first one wins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mergestream.errors import MergestreamError, StoreBusyError
from mergestream.files import to_json
from mergestream.storage.base import UNFINISHED, Storage, StoredFile, busy, changed, check_small
from mergestream.storage.client import Result, http_status, open_bucket, request
from mergestream.storage.url import Url

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore

_PART, _PARTS_AT_ONCE = 16 << 20, 4
"""Bytes of a part of a large upload, and how many are under way"""
_MARK = "mergestream"
"""Metadata of an object that is put conditionally: tells our own put, whose answer was lost, from another writer's"""
_NOT_IMPLEMENTED = 501


class BucketStorage(Storage):
    """The objects below a key of a bucket."""

    has_lock = False

    def __init__(self, url: Url) -> None:
        self.url = url
        self._listed: dict[str, StoredFile] | None = None
        self._guarded: str | None = None
        """The object that only this writer may replace, while it is writing"""
        self._expected: StoredFile | None = None
        """The version of it that was fetched or put last"""
        self._in_doubt = False
        """Whether a put of it got no answer. It may name any object then, so nothing is removed"""
        open_bucket(url.scheme, url.bucket)  # fails now if the library or credentials are missing

    def __str__(self) -> str:
        return str(self.url)

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketStorage, (self.url,)

    # --- reading

    def files(self, folder: str = "") -> dict[str, StoredFile]:
        if self._listed is None:
            listed = self._explained("", lambda: self._client.list(self.url.key or None).collect())
            self._listed = self._describe(listed)
        start = f"{folder}/" if folder else ""
        return {key.removeprefix(start): file for key, file in self._listed.items() if key.startswith(start)}

    def read(self, name: str) -> bytes | None:
        found = self.stat(name)  # by the listing, which does not cost a request
        if found is None:
            return None
        check_small(found)
        return found.read()

    def fetch(self, name: str) -> tuple[bytes, StoredFile] | None:
        def get() -> tuple[bytes, StoredFile] | None:
            try:
                answer = self._client.get(self._key(name))
            except FileNotFoundError:
                return None
            (file,) = self._describe([answer.meta]).values()
            check_small(file)
            return bytes(answer.bytes()), file

        self._listed = None
        found = self._explained(name, get)
        if name == self._guarded:
            if self._expected and (found is None or found[1].tag != self._expected.tag):
                raise changed(self)
            self._expected = found[1] if found else None
        return found

    def read_range(self, file: StoredFile, begin: int, end: int) -> bytes:
        options: GetOptions = {"range": (begin, end)}
        if file.tag:
            options["if_match"] = file.tag
        return self._explained(file.key, lambda: bytes(self._client.get(self._key(file.key), options=options).bytes()))

    def is_current(self, file: StoredFile | None) -> bool:
        self._listed = None
        if file is None:
            return False

        def has_same_tag() -> bool:
            try:
                return (self._client.head(self._key(file.key))["e_tag"] or "") == file.tag
            except FileNotFoundError:
                return False

        is_same = self._explained(file.key, has_same_tag)
        if is_same and file.key == self._guarded:
            self._expected = file
        return is_same

    # --- writing

    @property
    def is_empty(self) -> bool:
        self._listed = None
        return not self.files()

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """While the context is open, StoreBusyError as soon as another writer has replaced the object ``name``."""
        self._refuse_unconditional()
        self._guarded, self._expected = name, None
        try:
            yield
        except StoreBusyError:
            raise
        except MergestreamError:
            lost = self._expected and not self._in_doubt and not self.is_current(self._expected)
            if lost:  # the winner may have removed what was read
                raise changed(self) from None
            raise
        finally:
            self._guarded, self._in_doubt = None, False

    def put(self, name: str, path: Path) -> None:
        """Upload a file of any size; if one part of a large upload fails, all are removed."""
        upload = partial(self._client.put, self._key(name), path, chunk_size=_PART, max_concurrency=_PARTS_AT_ONCE)
        self._explained(name, upload, "written")
        self._listed = None

    def put_if(self, name: str, data: bytes, before: StoredFile | None) -> StoredFile:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        known = {"e_tag": before.tag, "version": before.version} if before else {}
        mode: Any = {key: value for key, value in known.items() if value} or "create"
        key, mark = self._key(name), {_MARK: uuid4().hex}

        def put() -> tuple[str | None, str | None]:
            try:
                done = self._client.put(key, data, mode=mode, attributes=mark, use_multipart=False)
                return done["e_tag"], done["version"]
            except (AlreadyExistsError, PreconditionError):
                there = self._client.get(key)
                if there.attributes.get(_MARK) != mark[_MARK]:
                    raise changed(self) from None
                return there.meta["e_tag"], there.meta["version"]

        self._in_doubt = name == self._guarded
        try:
            tag, version = self._explained(name, put, "written")
        except StoreBusyError:
            self._in_doubt = False
            raise
        self._in_doubt, self._listed = False, None
        file = StoredFile(self, name, len(data), tag or "", version)
        if name == self._guarded:
            self._expected = file
        return file

    def _refuse_unconditional(self) -> None:
        """Refuse a service without conditional puts, where two writers would overwrite each other.

        It is asked to replace an object that never existed; a service that does so ignores the condition.
        """
        from obstore.exceptions import GenericError, NotSupportedError, PreconditionError

        key = self._key(f"probe-{uuid4().hex}")
        never: Any = {"e_tag": '"0"', "version": "1"}

        def has_conditions() -> bool:
            try:
                self._client.put(key, b"", mode=never, use_multipart=False)
            except (PreconditionError, FileNotFoundError):
                return True
            except (NotSupportedError, NotImplementedError):
                return False
            except GenericError as error:
                if http_status(error) == _NOT_IMPLEMENTED:
                    return False
                raise
            self._client.delete(key)
            return False

        if not self._explained("", has_conditions, "written to"):
            reason = "the service has no conditional put, so two writers could overwrite each other"
            raise MergestreamError(f"{self} cannot hold a store: {reason}; keep the store on a disk")

    def copy(self, name: str, to: str) -> None:
        self._explained(name, lambda: self._client.copy(self._key(name), self._key(to)), "copied")
        self._listed = None

    def save_to(self, name: str, path: Path) -> None:
        file = self.files()[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as opened:
            for begin in range(0, file.size, _PART):
                opened.write(file.read(begin, min(begin + _PART, file.size)))

    def delete(self, names: Iterable[str]) -> None:
        deleted = set(names)
        keys = [self._key(name) for name in deleted]
        if keys:
            self._explained("", lambda: self._client.delete(keys), "deleted from")
            if self._listed is not None:
                self._listed = {name: file for name, file in self._listed.items() if name not in deleted}

    def remove(self, folder: str) -> None:
        if self._in_doubt:
            raise MergestreamError(f"whether {self}/{self._guarded} was replaced is unknown, so nothing is removed")
        self.delete([f"{folder}/{name}" if folder else name for name in self.files(folder)])

    def publish(self, draft: Path, folder: str) -> None:
        for path in sorted(draft.iterdir()):
            self.put(f"{folder}/{path.name}", path)

    @contextmanager
    def replacing(self, marker: str, check: Callable[[], None]) -> Iterator[Path]:
        """Upload a draft; the marker says that the folder is unfinished until then, and is put by compare-and-swap."""
        with self.workspace() as temporary:
            draft = temporary / "model"
            draft.mkdir()
            yield draft
            found = self.fetch(marker)
            check()
            before = found[1] if found else None
            files = {path.relative_to(draft).as_posix(): path for path in sorted(draft.rglob("*")) if path.is_file()}
            content = json.loads(files.pop(marker).read_bytes())
            try:
                claim = self.put_if(marker, to_json({**content, UNFINISHED: True}).encode(), before)
                for name, path in files.items():
                    self.put(name, path)
                self.delete(self.files().keys() - files.keys() - {marker})
                self.put_if(marker, to_json(content).encode(), claim)
            except StoreBusyError:  # the objects are the other writer's now
                raise busy(self) from None
            except BaseException:
                if before is None:
                    with suppress(MergestreamError):
                        self.delete([*files, marker])
                raise

    # --- temporary files

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        with TemporaryDirectory(prefix="mergestream-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)

    # --- requests

    def _key(self, name: str) -> str:
        return f"{self.url.key}/{name}".strip("/")

    def _describe(self, listed: Iterable[Mapping[str, Any]]) -> dict[str, StoredFile]:
        start = f"{self.url.key}/" if self.url.key else ""
        return {
            name: StoredFile(
                self, name, entry["size"], entry["e_tag"] or "", entry["version"], entry["last_modified"].timestamp()
            )
            for entry in listed
            if entry["path"].startswith(start)  # else it marks the folder itself
            if (name := entry["path"].removeprefix(start))
        }

    def _explained(self, name: str, ask: Callable[[], Result], done: str = "read") -> Result:
        return request(f"{self}/{name}" if name else str(self), ask, done)

    @property
    def _client(self) -> ObjectStore:
        return open_bucket(self.url.scheme, self.url.bucket)
