"""Models in object storage: the small files are fetched, the weights stay where they are and are read by range."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mergestream.checkpoints.formats import is_weight_file
from mergestream.checkpoints.layout import CODE, is_index, may_go_along, names_code
from mergestream.digest import text_digest
from mergestream.errors import MergestreamError, known_as
from mergestream.files import MAX_JSON_BYTES
from mergestream.storage import ModelFolder, StoredFile
from mergestream.storage.transfer import start, wait_all


def fetch_companions(folder: ModelFolder, source: str) -> tuple[Path, dict[str, StoredFile]]:
    """A directory with all of a model but its weights, and these, by their names.

    It is this process's own, and gone with it. What has not changed is not fetched again.
    """
    listing = folder.scan()
    objects = dict(listing.files)
    for name in listing.folders:
        if may_go_along(f"{name}/{CODE}.json"):
            objects |= folder.list_below(name)
    if strange := [name for name in objects if not {"", ".", ".."}.isdisjoint(name.split("/"))]:
        raise MergestreamError(f"{source} holds {strange[0]!r}, which is no name of a file in it; remove it")
    weights = {name: found for name, found in listing.files.items() if is_weight_file(name)}
    small = {name: found for name, found in objects.items() if may_go_along(name) or is_index(name)}
    directory = _fetched(folder.name, source, small)
    if names_code(directory):
        everything = folder.list_below()
        directory = _fetched(
            folder.name, source, small | {name: everything[name] for name in everything if name.endswith(CODE)}
        )
    return directory, weights


def _fetched(name: str, source: str, wanted: Mapping[str, StoredFile]) -> Path:
    """The directory that holds them; it ends in the folder's name, by which messages speak of it."""
    lines = [source, *(f"{key} {found.size} {found.tag}" for key, found in sorted(wanted.items()))]
    directory = _root() / text_digest("\n".join(lines)) / name
    if not directory.exists():
        draft = Path(tempfile.mkdtemp(dir=_root())) / name
        draft.mkdir()
        wait_all([start(_fetch, found, draft / key) for key, found in wanted.items()])
        directory.parent.mkdir(exist_ok=True)
        draft.rename(directory)
        known_as(directory, source)
    return directory


def _fetch(found: StoredFile, path: Path) -> None:
    if found.size > MAX_JSON_BYTES:
        raise MergestreamError(f"{found} is too large to be what goes with a model; move it elsewhere")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(found.read())


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mergestream-")


def _root() -> Path:
    return Path(_temporary().name)
