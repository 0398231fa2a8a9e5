"""A store on the hub: pushed as it is after some step, pulled and checked before it takes its place."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from mergestream.checkpoints.location import shown
from mergestream.errors import MergestreamError
from mergestream.escaping import code
from mergestream.export.card import history_section, removed_experts
from mergestream.files import sync_directory, sync_file
from mergestream.hub.repository import connect, explained, push_files, repository_name
from mergestream.storage import Storage, local_path
from mergestream.storage.local import LocalStorage
from mergestream.store.directory import StoreDirectory
from mergestream.store.manifest import MANIFEST, Manifest
from mergestream.store.records import record_folder
from mergestream.store.steps import UNFINISHED

_PART = re.compile(r"manifest\.json|scores\.json|(steps|experts)/[0-9]{4,}(-[0-9a-f]+)?/[A-Za-z0-9][\w.-]*")
_BESIDE = re.compile(r"README\.md|\.git\w*")
_CARD = "README.md"


def holds_store(files: Collection[str]) -> bool:
    """Whether a repository with these files is a store's."""
    return MANIFEST in files


def push_store(store: StoreDirectory, address: str, *, private: bool = False) -> str:
    """Upload what the store is now, and will be whatever is added meanwhile; returns the address of the repository."""
    name = repository_name(address)

    def check(present: set[str]) -> None:
        if others := sorted(file for file in present if not (_PART.fullmatch(file) or _BESIDE.fullmatch(file))):
            raise MergestreamError(f"{name} holds {others[0]}, which is of no store; push the store elsewhere")

    with _snapshot(store) as (place, manifest):
        sources = manifest.base.source, *(entry.source for entry in manifest.history)
        if not private and any(Path(source).is_absolute() for source in sources):
            store.progress.note(f"whoever sees {name} sees where base and experts lie here; --private hides it")
        (place / _CARD).write_text(_card(store.place, manifest, name), encoding="utf-8")
        files = {path.relative_to(place).as_posix(): path for path in sorted(place.rglob("*")) if path.is_file()}
        message = f"A store of mergestream at step {manifest.step}"
        return push_files(
            name, files, private=private, message=message, is_ours=lambda file: bool(_PART.fullmatch(file)), check=check
        )


@contextmanager
def _snapshot(store: StoreDirectory) -> Iterator[tuple[Path, Manifest]]:
    """Links to all files of the store that belong together: none of them is ever written to again."""
    beside = store.path.resolve().parent
    place = beside if os.access(beside, os.W_OK) else None
    with TemporaryDirectory(prefix=f".{store.path.name}.push-", dir=place) as temporary:
        links = Path(temporary) / "store"

        def link() -> Manifest:
            shutil.rmtree(links, ignore_errors=True)
            for path in _parts(store):
                there = links / path.relative_to(store.path)
                there.parent.mkdir(parents=True, exist_ok=True)
                _link(path, there)
            store.refresh()
            return Manifest.load(LocalStorage(links))

        yield links, store.retried(link)


def _parts(store: StoreDirectory) -> Iterator[Path]:
    yield from (path for name in (MANIFEST, "scores.json") if (path := store.path / name).is_file())
    for entry in store.history:
        steps, records = store.path / "steps" / entry.folder, store.path / record_folder(entry.folder)
        yield from (path for path in records.iterdir())
        if entry.state and steps.is_dir():  # else it is no longer kept
            yield from (path for path in steps.iterdir() if path.name not in UNFINISHED)


def _link(path: Path, there: Path) -> None:
    try:
        there.hardlink_to(path)
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, there)


def _card(storage: Storage, manifest: Manifest, name: str) -> str:
    base = shown(manifest.base.source, manifest.base.given)
    lines = [
        *("---", "library_name: mergestream", "tags:", "- mergestream", "---", ""),
        "# A store of mergestream",
        "",
        f"Experts of {code(base)}, merged by {code(manifest.method)}. To go on with it:",
        "",
        f"    mergestream pull hf://{name} store",
        *history_section(manifest, removed_experts(storage, manifest)),
        "",
    ]
    return "\n".join(lines)


def pull_store(address: str, path: Path, check: Callable[[Path], None]) -> None:
    """Download a store; ``check`` may refuse it, by raising an error, before it takes its place.

    What has been downloaded when it breaks off stays beside the place, and the next pull goes on from there.
    """
    given, _, revision = address.partition("@")
    name = repository_name(given)
    local_path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise MergestreamError(f"{path} exists already and is not empty; choose another place for the store")
    work = path.resolve().with_name(f".{path.name}.pull")
    try:
        _download(name, revision or None, work)
        check(work)
        for part in (*work.rglob("*"), work):
            sync_file(part)
        work.rename(path)
        sync_directory(work.parent)
    except OSError as error:
        raise MergestreamError(f"{path} was not pulled: {error.strerror or error}") from error


def _download(name: str, revision: str | None, work: Path) -> None:
    """The parts of a store, and nothing else that is in a repository."""
    api = connect()
    with explained(name, "pulled"):
        found = api.model_info(name, revision=revision)
        files = [sibling.rfilename for sibling in found.siblings or []]
        wanted = [file for file in files if _PART.fullmatch(file)]
        if not holds_store(wanted):
            raise MergestreamError(f"{name} holds no store; to merge a model from the hub, name it as {name}")
        work.mkdir(parents=True, exist_ok=True)
        api.snapshot_download(name, revision=found.sha, local_dir=work, allow_patterns=wanted)
    shutil.rmtree(work / ".cache", ignore_errors=True)
    for path in work.rglob("*"):
        if not path.is_dir() and path.relative_to(work).as_posix() not in wanted:
            path.unlink()  # of another commit, where an earlier pull has broken off
