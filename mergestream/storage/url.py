"""URLs of object storage: ``s3://bucket/key``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from mergestream.errors import UsageError

_SCHEMES = ("s3", "gs", "az", "hf")


class Url(NamedTuple):
    """The place of an object, or of a folder of objects: ``s3://bucket/key``."""

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> Url:
        """The folder that holds it."""
        return self._replace(key=self.key.rpartition("/")[0])

    def child(self, name: str) -> Url:
        """The URL of a file or folder in this folder."""
        return self._replace(key=f"{self.key}/{name}".strip("/"))


def parse_url(place: str | Path) -> Url | None:
    """Parse a URL of object storage, also one that a `Path` was made of; None for a local path."""
    scheme, separator, rest = str(place).partition(":/")
    scheme = scheme.lower()
    if not separator or scheme not in _SCHEMES:
        if rest.startswith("/") and scheme.isalnum():
            raise UsageError(f"{scheme}:// is not supported; write s3://, gs:// or az:// for object storage")
        return None
    bucket, _, key = rest.strip("/").partition("/")
    if re.search("[@:]", bucket) or "?" in rest:
        raise UsageError(
            "a URL of object storage with credentials or a query is refused; put credentials into the environment"
        )
    if not bucket or not all(part.isprintable() and part not in ("", ".", "..") for part in key.split("/") if key):
        raise UsageError(f"{scheme}://{rest.lstrip('/')!a} is not a URL of object storage: give {scheme}://BUCKET/PATH")
    return Url(scheme, bucket, key)


def local_path(place: str | Path) -> Path:
    """Convert to a local path; refuse a URL of object storage."""
    if url := parse_url(place):
        raise UsageError(f"{url} is in object storage, which can only hold models and stores; give a local path")
    return Path(place)
