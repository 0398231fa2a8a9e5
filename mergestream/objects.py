"""Objects in a bucket: where files are that no path leads to, read by range and put whole through obstore.

What a service says when it fails is never shown: an error of the library may quote an address with a token in it.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from uuid import uuid4

from mergestream.errors import MergestreamError, UsageError

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, ObjectStore

Result = TypeVar("Result")

_SPELLINGS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "hf": "hf"}
"""How people write the scheme, and how it is kept"""
_OTHERS = {"abfs": "az", "abfss": "az"}
"""Spellings that name an account besides"""
_CREDENTIALS = {
    "s3": (
        *("AWS_ACCESS_KEY_ID+AWS_SECRET_ACCESS_KEY", "AWS_SKIP_SIGNATURE"),
        *("AWS_ROLE_ARN+AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ),
    "gs": (
        *("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SKIP_SIGNATURE", "GOOGLE_BEARER_TOKEN"),
        *("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    ),
    "az": tuple(
        f"AZURE_STORAGE_ACCOUNT_NAME+AZURE_{way}"
        for way in ("STORAGE_ACCOUNT_KEY", "SKIP_SIGNATURE", "STORAGE_SAS_TOKEN", "CLIENT_SECRET")
    ),
}
"""Variables of the environment, one way to be let in each: the first is the usual one, the second for what is public"""
_RANGE = 4 << 20
"""Bytes that are asked for at once: a request costs about as much as so many take on a fast network"""
_PART, _PARTS_AT_ONCE = 16 << 20, 4
"""The same for what is put"""
_AT_ONCE = 8
"""Requests under way in this process, and so, times ``_RANGE``, what is read ahead"""
_MARK = "mergestream"
"""Metadata of an object that is put where another may be"""
_TRIES = 9
_FIRST_PAUSE = 0.1
"""Seconds; each pause is twice the one before, so that a service has half a minute to come back"""
_STATUS = re.compile(r"status code: (\d{3})\b")


class Url(NamedTuple):
    """Where an object is, or a folder of objects: ``s3://bucket/key``."""

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> Url:
        return self._replace(key=self.key.rpartition("/")[0])


def url_of(place: str | Path) -> Url | None:
    """What is meant where it is in object storage, also where a `Path` was made of it; None where it is on a disk."""
    scheme, separator, rest = str(place).partition(":/")
    scheme = scheme.lower()
    if not separator or scheme not in _SPELLINGS | _OTHERS:
        return None
    if scheme in _OTHERS:
        raise UsageError(f"{scheme}:// is another way to write {_OTHERS[scheme]}://, for object storage: use that one")
    bucket, _, key = rest.strip("/").partition("/")
    if re.search("[@:]", bucket) or "?" in rest:
        raise UsageError(
            f"an address of object storage with credentials or a query in it is refused, for it would be kept and "
            f"shown: give {scheme}://BUCKET/PATH, and put credentials into the environment"
        )
    if not bucket or not all(part.isprintable() and part not in ("", ".", "..") for part in key.split("/") if key):
        raise UsageError(
            f"{scheme}://{rest.lstrip('/')!a} is no address in object storage: give {scheme}://BUCKET/PATH"
        )
    return Url(_SPELLINGS[scheme], bucket, key)


@dataclass(frozen=True)
class Object:
    """One object as it was listed; it is read only as long as it is the same."""

    folder: Objects
    name: str
    """Below the folder"""
    size: int
    tag: str
    """Changes when the object does"""
    version: str | None = None
    """By which some services know it besides"""

    def __str__(self) -> str:
        return f"{self.folder.url}/{self.name}"

    def read(self, begin: int = 0, end: int | None = None) -> bytes:
        end = self.size if end is None else end
        data = _tried(str(self), lambda: self.folder.read(self, begin, end)) if begin < end else b""
        if len(data) != end - begin:
            raise MergestreamError(f"{self} gave {len(data)} bytes where {end - begin} were asked for; copy it again")
        return data

    def read_into(self, buffer: memoryview, begin: int) -> None:
        """Fill a buffer with what is there from ``begin`` on, range by range, some of them at a time."""

        def fetch(start: int) -> None:
            stop = min(start + _RANGE, len(buffer))
            buffer[start:stop] = self.read(begin + start, begin + stop)

        wait_for(in_background(fetch, start) for start in range(0, len(buffer), _RANGE))


class Listing(NamedTuple):
    """What is in a folder: objects by their names, and the names of folders."""

    objects: Mapping[str, Object]
    folders: tuple[str, ...]


class Objects(Protocol):
    """A folder of objects."""

    @property
    def url(self) -> Url: ...

    def listing(self) -> Listing:
        """Of the folder itself."""

    def below(self, folder: str) -> Mapping[str, Object]:
        """All objects below a folder in it, by their names from here; all of them for ``""``."""

    def read(self, found: Object, begin: int, end: int) -> bytes:
        """Once; a `PassingError` where it may be tried again."""


class PassingError(OSError):
    """Something that may be better next time: a connection that broke off, a service that is busy. Tells what."""


@dataclass(frozen=True)
class Bucket:
    """A folder in a bucket of S3, Google Cloud Storage or Azure."""

    url: Url

    def __post_init__(self) -> None:
        _bucket(self.url.scheme, self.url.bucket)  # where the library or credentials are missing, it is told now

    def listing(self) -> Listing:
        import obstore

        found = self._tried(lambda: obstore.list_with_delimiter(self._store, self.url.key or None))
        folders = tuple(path.removesuffix("/").rpartition("/")[2] for path in found["common_prefixes"])
        return Listing(self._objects(found["objects"]), folders)

    def below(self, folder: str) -> Mapping[str, Object]:
        import obstore

        prefix = "/".join(part for part in (self.url.key, folder) if part)
        return self._objects(self._tried(lambda: obstore.list(self._store, prefix or None).collect()))

    def read(self, found: Object, begin: int, end: int) -> bytes:
        import obstore

        with_tag: GetOptions = {"range": (begin, end)}
        if found.tag:
            with_tag["if_match"] = found.tag
        get = partial(obstore.get, self._store, self._path(found.name), options=with_tag)
        return self._explained(str(found), lambda: bytes(get().bytes()))

    def put(self, name: str, data: bytes, before: Object | None) -> Object:
        """Put an object in the place of the one ``before``, or where there is none; FileExistsError where another is.

        It bears a mark, by which one whose answer was lost is told from another writer's.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        known = {"e_tag": before.tag, "version": before.version} if before else {}
        mode: Any = {key: value for key, value in known.items() if value} or "create"
        path, mark = self._path(name), {_MARK: uuid4().hex}

        def once() -> Object:
            try:
                done = obstore.put(self._store, path, data, mode=mode, attributes=mark, use_multipart=False)
                return Object(self, name, len(data), done["e_tag"] or "", done["version"])
            except (AlreadyExistsError, PreconditionError):
                there = obstore.get(self._store, path)
                if there.attributes.get(_MARK) != mark[_MARK]:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.url}/{name}") from None
                return Object(self, name, len(data), there.meta["e_tag"] or "", there.meta["version"])

        return _tried(f"{self.url}/{name}", lambda: self._explained(f"{self.url}/{name}", once), "written")

    def upload(self, name: str, file: Path) -> None:
        """Put a file, however large: in parts, which are removed again where one of them cannot be put."""
        import obstore

        store = _bucket(self.url.scheme, self.url.bucket, _TRIES)
        path, what = self._path(name), f"{self.url}/{name}"
        put = partial(obstore.put, store, path, file, chunk_size=_PART, max_concurrency=_PARTS_AT_ONCE)
        try:
            self._explained(what, put)
        except PassingError as error:  # here the library has tried again, for one part does not cost all of them
            raise _given_up(what, "written", error) from error

    def delete(self, names: Iterable[str]) -> None:
        """Also where they are gone already."""
        import obstore

        paths = [self._path(name) for name in names]
        if paths:
            self._tried(lambda: obstore.delete(self._store, paths), "deleted from")

    def _path(self, name: str) -> str:
        return f"{self.url.key}/{name}".lstrip("/")

    def _objects(self, listed: Iterable[Mapping[str, Any]]) -> dict[str, Object]:
        start = f"{self.url.key}/" if self.url.key else ""
        return {
            name: Object(self, name, entry["size"], entry["e_tag"] or "", entry["version"])
            for entry in listed
            if (name := entry["path"].removeprefix(start))
        }

    def _tried(self, ask: Callable[[], Result], done: str = "read") -> Result:
        return _tried(str(self.url), lambda: self._explained(str(self.url), ask), done)

    def _explained(self, what: str, ask: Callable[[], Result]) -> Result:
        from obstore import exceptions

        try:
            return ask()
        except FileNotFoundError:
            raise fault(what, 404) from None
        except exceptions.PreconditionError:
            raise MergestreamError(f"{what} has changed since it was opened; start again") from None
        except (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
            raise fault(what, 403) from None
        except exceptions.GenericError as error:
            status = _STATUS.search(str(error))
            raise fault(what, int(status[1]) if status else None) from None
        except exceptions.BaseError:
            raise MergestreamError(f"{what}: the service refuses this") from None

    @property
    def _store(self) -> ObjectStore:
        return _bucket(self.url.scheme, self.url.bucket)


@cache
def _bucket(scheme: str, bucket: str, retries: int = 0) -> ObjectStore:
    """The library's own; whatever it needs to know besides is in the environment."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise MergestreamError(
            f"{scheme}://{bucket} is in object storage, and for that the package obstore is missing: "
            "pip install 'mergestream[cloud]'"
        ) from error
    if not any(all(map(_is_set, way.split("+"))) for way in _CREDENTIALS[scheme]):
        # Else the library would ask the machine that it runs on.
        own, public, *_ = (way.replace("+", " and ") for way in _CREDENTIALS[scheme])
        raise MergestreamError(
            f"for {scheme}://{bucket} there are no credentials in the environment: set {own}, or for a public bucket "
            f"{public}=true"
        )
    # Plain HTTP is spoken only where an endpoint in the environment says so.
    options: ClientConfig = {"allow_http": True}
    return from_url(f"{scheme}://{bucket}", client_options=options, retry_config={"max_retries": retries})


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() not in ("", "0", "false")


def fault(what: str, status: int | None) -> Exception:
    """What an answer means by which nothing was got, by its number in HTTP; None where there was no answer."""
    match status:
        case None:
            return PassingError("no answer, or one that broke off")
        case 404:
            return MergestreamError(f"{what} does not exist")
        case 401 | 403:
            return MergestreamError(
                f"{what} may not be read or written with the credentials in the environment; check them"
            )
        case _ if status >= 500 or status in (408, 429):
            return PassingError(f"the service is not able to (HTTP {status})")
    return MergestreamError(f"{what}: the service refuses this (HTTP {status})")


def _tried(what: str, ask: Callable[[], Result], done: str = "read") -> Result:
    """What comes of it at the first time that nothing breaks."""
    pause = _FIRST_PAUSE
    for _ in range(_TRIES - 1):
        try:
            return ask()
        except PassingError:
            time.sleep(pause)
            pause *= 2
    try:
        return ask()
    except PassingError as error:
        raise _given_up(what, done, error) from error


def _given_up(what: str, done: str, error: PassingError) -> MergestreamError:
    return MergestreamError(f"{what} cannot be {done}, after {_TRIES} attempts: {error}; try again later")


@cache
def _fetchers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="mergestream-fetch")


def in_background(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Have it done by one of the few threads that wait for the network, which must not wait for each other."""
    return _fetchers().submit(work, *arguments)


def wait_for(works: Iterable[Future[Any]]) -> None:
    """Until all are done; at the first that fails the others are called off."""
    waiting = list(works)
    try:
        for work in waiting:
            work.result()
    except BaseException:
        for work in waiting:
            work.cancel()
        raise
