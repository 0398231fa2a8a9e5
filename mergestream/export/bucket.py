"""An export to object storage: a folder of objects, of which the marker says whether they are whole."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mergestream.checkpoints.layout import MARKER, UNFINISHED
from mergestream.errors import MergestreamError, StoreBusyError
from mergestream.files import to_json
from mergestream.storage import StoredFile, parse_url
from mergestream.storage.bucket import BucketStorage


@dataclass(frozen=True)
class BucketOutput:
    """A folder to be.

    Its marker is put first, with a key that says that it is unfinished, and again at last: each time in the place of
    the one that was seen, so that of two exports only one comes to its end.
    """

    folder: BucketStorage
    overwrite: bool

    def keep_off(self, *sources: str | Path) -> None:
        """Refuse an output that is, lies in or holds one of the sources."""
        own = f"{self.folder.url}/"
        for url in filter(None, map(parse_url, sources)):
            if own.startswith(f"{url}/") or f"{url}/".startswith(own):
                raise MergestreamError(
                    f"{self.folder.url} is, lies in or holds {url}, which the merge is made of; choose another place"
                )

    def refuse_to_destroy(self) -> None:
        """Refuse a place where there is anything but an earlier export, which may be replaced."""
        self._replaced()

    def _replaced(self) -> StoredFile | None:
        """The marker of what is replaced; None where there is nothing."""
        url, there = self.folder.url, self.folder.list_below()
        if not there:
            return None
        marker = there.get(MARKER)
        known: object = None
        if marker is not None:
            with suppress(ValueError):
                known = json.loads(marker.read())
        if marker is None or not isinstance(known, dict) or not {"mergestream", "command"} <= known.keys():
            raise MergestreamError(f"{url} is not empty, and no export of mergestream; choose another place")
        if not self.overwrite:
            raise MergestreamError(f"{url} exists already; pass --overwrite to replace it")
        if any(name.rpartition("/")[2] == "manifest.json" for name in there):
            raise MergestreamError(f"{url} holds a store; choose another place")
        return marker

    def publish(self, draft: Path) -> None:
        """Upload what was written; an output that is new, and cannot be whole, is removed again."""
        files = {str(path.relative_to(draft)): path for path in sorted(draft.rglob("*")) if path.is_file()}
        marker = json.loads(files.pop(MARKER).read_bytes())
        before = self._replaced()
        try:
            claim = self._mark({**marker, UNFINISHED: True}, before)
            for name, path in files.items():
                self.folder.put(name, path)
            self.folder.delete(self.folder.list_below().keys() - files.keys() - {MARKER})
            self._mark(marker, claim)
        except StoreBusyError:  # what is there is another's
            raise
        except BaseException:
            if before is None:
                with suppress(MergestreamError):
                    self.folder.delete([*files, MARKER])
            raise

    def _mark(self, content: dict[str, object], before: StoredFile | None) -> StoredFile:
        try:
            return self.folder.put_if(MARKER, to_json(content).encode(), before)
        except StoreBusyError:
            raise StoreBusyError(
                f"{self.folder.url} is being written by another export; wait until it is done"
            ) from None
