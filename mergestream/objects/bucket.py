"""A folder in a bucket of S3, Google Cloud Storage or Azure, through obstore.

What a service says when it fails is never shown: an error of the library may quote an address with a token in it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mergestream.errors import MergestreamError
from mergestream.objects.address import Url
from mergestream.objects.folder import Listing, Object
from mergestream.objects.trying import TRIES, PassingError, Result, fault, given_up, tried

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, ObjectStore

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
_PART, _PARTS_AT_ONCE = 16 << 20, 4
"""Bytes that are put at once, and how often"""
_MARK = "mergestream"
"""Metadata of an object that is put where another may be"""
_NOT_IMPLEMENTED = 501
_STATUS = re.compile(r"status code: (\d{3})\b")


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

    def get(self, name: str) -> tuple[Object, bytes] | None:
        """An object as it is now, and what is in it; None where there is none."""
        import obstore

        def once() -> tuple[Object, bytes] | None:
            try:
                found = obstore.get(self._store, self._path(name))
            except FileNotFoundError:
                return None
            (listed,) = self._objects([found.meta]).values()
            return listed, bytes(found.bytes())

        return self._tried(once)

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

        return tried(f"{self.url}/{name}", lambda: self._explained(f"{self.url}/{name}", once), "written")

    def refuse_without_conditions(self) -> None:
        """Refuse a service that puts an object whatever is there: of two writers both would win.

        It is asked to replace an object that never was. One that does so has written nothing that counts.
        """
        import obstore
        from obstore.exceptions import GenericError, NotSupportedError, PreconditionError

        name = f"probe-{uuid4().hex}"
        never: Any = {"e_tag": '"0"', "version": "1"}

        def refuses() -> bool:
            try:
                obstore.put(self._store, self._path(name), b"", mode=never, use_multipart=False)
            except (PreconditionError, FileNotFoundError):
                return True
            except (NotSupportedError, NotImplementedError):
                return False
            except GenericError as error:
                if _status(error) == _NOT_IMPLEMENTED:
                    return False
                raise
            obstore.delete(self._store, self._path(name))
            return False

        if not self._tried(refuses, "written to"):
            raise MergestreamError(
                f"{self.url} cannot hold a store: the service has no conditional put, by which of two writers only one "
                "wins; keep the store on a disk, or with a service that has it"
            )

    def upload(self, name: str, content: Path | bytes | Iterable[bytes]) -> None:
        """Put a file, however large: in parts, which are removed again where one of them cannot be put."""
        import obstore

        store = _bucket(self.url.scheme, self.url.bucket, TRIES)
        path, what = self._path(name), f"{self.url}/{name}"
        put = partial(obstore.put, store, path, content, chunk_size=_PART, max_concurrency=_PARTS_AT_ONCE)
        try:
            self._explained(what, partial(put, use_multipart=False if isinstance(content, bytes) else None))
        except PassingError as error:  # here the library has tried again, for one part does not cost all of them
            raise given_up(what, "written", error) from error

    def copy(self, name: str, to: str) -> None:
        """Within the bucket, and not through here."""
        import obstore

        copy = partial(obstore.copy, self._store, self._path(name), self._path(to))
        what = f"{self.url}/{name}"
        tried(what, lambda: self._explained(what, copy), "copied")

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
            name: Object(
                self, name, entry["size"], entry["e_tag"] or "", entry["version"], entry["last_modified"].timestamp()
            )
            for entry in listed
            if entry["path"].startswith(start)  # else it marks the folder itself
            if (name := entry["path"].removeprefix(start))
        }

    def _tried(self, ask: Callable[[], Result], done: str = "read") -> Result:
        return tried(str(self.url), lambda: self._explained(str(self.url), ask), done)

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
            raise fault(what, _status(error)) from None
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


def _status(error: Exception) -> int | None:
    """Of an answer, as the library tells it."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() not in ("", "0", "false")
