"""How a place in object storage is written: ``s3://bucket/key``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from mergestream.errors import UsageError

_SPELLINGS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "hf": "hf"}
"""How people write the scheme, and how it is kept"""
_OTHERS = {"abfs": "az", "abfss": "az"}
"""Spellings that name an account besides"""


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

    def below(self, key: str) -> Url:
        return self._replace(key=f"{self.key}/{key}".lstrip("/"))

    @property
    def parent(self) -> Url:
        return self._replace(key=self.key.rpartition("/")[0])

    def child(self, name: str) -> Url:
        return self._replace(key=f"{self.key}/{name}".lstrip("/"))


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
