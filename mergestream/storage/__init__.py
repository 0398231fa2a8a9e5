"""Storage: named files in a local directory or in a bucket, behind one protocol."""

from __future__ import annotations

from pathlib import Path

from mergestream.errors import UsageError
from mergestream.storage.base import UNFINISHED, Storage, StoredFile, read_json, read_text, total_bytes
from mergestream.storage.bucket import BucketStorage
from mergestream.storage.local import LocalStorage
from mergestream.storage.url import Url, local_path, parse_url

__all__ = [
    "UNFINISHED",
    "Storage",
    "StoredFile",
    "Url",
    "local_path",
    "open_storage",
    "parse_url",
    "read_json",
    "read_text",
    "total_bytes",
]


def open_storage(place: str | Path | Storage) -> Storage:
    """The storage at a local path or a URL of a bucket."""
    if not isinstance(place, str | Path):
        return place
    url = parse_url(place)
    if url is None:
        return LocalStorage(Path(place))
    if url.scheme == "hf":
        raise UsageError(f"{url} is on the hub, where stores are pushed to: mergestream pull {url} STORE downloads it")
    return BucketStorage(url)
