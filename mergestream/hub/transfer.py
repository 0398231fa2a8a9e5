"""Pushing exports and stores to the hub, and pulling stores.

A push is one commit, so that readers see all of it or nothing. The hub knows uploaded files by their content: a push
that is repeated after an interruption uploads only the rest.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from mergestream.checkpoints.hub import LOGIN, UPLOAD, connect, explained
from mergestream.checkpoints.layout import CARD
from mergestream.checkpoints.location import public_name
from mergestream.errors import MergestreamError, UsageError
from mergestream.escaping import code
from mergestream.export.card import history_section
from mergestream.export.places import is_export
from mergestream.files import sync_directory, sync_file
from mergestream.storage import local_path, open_storage
from mergestream.store.manifest import MANIFEST, Manifest
from mergestream.store.records import record_folder
from mergestream.store.steps import JOURNAL, PLAN
from mergestream.store.store import Store
from mergestream.store.transaction import retried

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_PART = re.compile(r"manifest\.json|scores\.json|(steps|experts|inputs)/[0-9]{4,}(-[0-9a-f]+)?/[A-Za-z0-9][\w.-]*")
_BESIDE = re.compile(r"README\.md|\.git\w*")


def repository_name(address: str) -> str:
    """Parse ``ORG/NAME`` or ``hf://ORG/NAME``."""
    name = address.removeprefix("hf://")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{address} is not a repository on the hub: write hf://ORG/NAME")
    return name


def check_login(address: str) -> str:
    """The name of a repository that can be pushed to; an error without huggingface_hub, or without a token."""
    name = repository_name(address)
    connect(name)
    import huggingface_hub

    if not huggingface_hub.get_token():
        raise MergestreamError(f"there is no token for the hub: {LOGIN}, or set HF_TOKEN")
    return name


def push_model(export: str | Path, address: str, *, private: bool = False) -> str:
    """Upload an export with its card and recipe; returns the URL of the repository.

    Weights of an earlier push that this export does not have are deleted; other files in the repository stay.
    """
    name, place = check_login(address), local_path(export)
    if not is_export(open_storage(place)):
        raise MergestreamError(f"{place} is neither a store nor an export of mergestream; there is nothing to push")

    def find_ours(present: set[str]) -> set[str]:
        if MANIFEST in present:
            raise MergestreamError(f"{name} holds a store; push the model elsewhere")
        return {file for file in present if file.endswith((".safetensors", ".safetensors.index.json"))}

    return _push(name, place, "A merged model, by mergestream", find_ours, private)


def push_store(store: Store, address: str, *, private: bool = False) -> str:
    """Upload the store as it is now, even if a writer changes it meanwhile; returns the URL of the repository."""
    name = check_login(address)

    def find_ours(present: set[str]) -> set[str]:
        ours = {file for file in present if _PART.fullmatch(file)}
        if others := sorted(file for file in present - ours if not _BESIDE.fullmatch(file)):
            raise MergestreamError(f"{name} holds {others[0]}, which is not part of a store; push the store elsewhere")
        return ours

    with _copied(store) as (copy, manifest):
        sources = manifest.base.source, *(entry.source for entry in manifest.history)
        if not private and any(Path(source).is_absolute() for source in sources):
            store.progress.note(f"readers of {name} see the local paths of base and experts; --private hides it")
        (copy / CARD).write_text(_card(manifest, name), encoding="utf-8")
        return _push(name, copy, f"A store of mergestream at step {manifest.step}", find_ours, private)


def _push(name: str, directory: Path, message: str, find_ours: Callable[[set[str]], set[str]], private: bool) -> str:
    """Upload a directory in one commit; returns the URL of the repository.

    ``find_ours`` finds the files of an earlier push, which are deleted or replaced, among those of the repository, and
    refuses one that holds something else. ``private`` makes a new repository private, and refuses a public one.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    files = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    api = connect(name)
    with explained(name, UPLOAD):
        address = str(api.create_repo(name, private=private or None, exist_ok=True))
        found = api.model_info(name)
        if private and not found.private:
            raise MergestreamError(f"{name} exists and is public: make it private on the hub, or push elsewhere")
        ours = find_ours({sibling.rfilename for sibling in found.siblings or []})
        added = [CommitOperationAdd(there, here) for there, here in files.items()]
        left = [CommitOperationDelete(there) for there in sorted(ours - files.keys())]
        api.create_commit(name, [*left, *added], commit_message=message)
    return address


@contextmanager
def _copied(store: Store) -> Iterator[tuple[Path, Manifest]]:
    """A local copy of the files that belong to one manifest, made of hard links if possible."""
    local = store.storage.path()
    parent = local.resolve().parent if local else None
    beside = parent if parent and os.access(parent, os.W_OK) else None
    with TemporaryDirectory(prefix=".mergestream-push-", dir=beside) as temporary:
        copy = Path(temporary) / "store"

        def copy_files() -> Manifest:
            shutil.rmtree(copy, ignore_errors=True)
            for name in _parts(store):
                store.storage.save_to(name, copy / name)
            store.refresh()
            return Manifest.load(open_storage(copy))

        yield copy, retried(store, copy_files)


def _parts(store: Store) -> Iterator[str]:
    """The names of all files that the manifest needs."""
    yield MANIFEST
    if store.storage.stat("scores.json"):
        yield "scores.json"
    folders = [record_folder(entry.folder) for entry in store.history]
    folders += [f"steps/{entry.folder}" for entry in store.history if entry.state]
    folders += [f"inputs/{entry.folder}" for entry in dataclasses.replace(store.manifest, removed=()).inputs]
    for folder in folders:
        files = store.storage.files(folder)
        yield from (f"{folder}/{name}" for name in files if not name.startswith((PLAN, JOURNAL)))


def _card(manifest: Manifest, name: str) -> str:
    base = public_name(manifest.base.source, manifest.base.given)
    history = "\n".join(history_section(manifest))
    return f"""---
library_name: mergestream
tags:
- mergestream
---

# A store of mergestream

Experts of {code(base)}, merged by {code(manifest.method)}. To continue with it:

    mergestream pull hf://{name} store
{history}
"""


def pull_store(address: str, path: Path, base: str | Path | None, open_store: Callable[[Path], Store]) -> None:
    """Download a store to ``path`` and verify it; ``base`` is where its base is here.

    An interrupted download stays beside ``path``, and the next pull resumes it.
    """
    given, _, revision = address.partition("@")
    name = repository_name(given)
    if not open_storage(local_path(path)).is_empty:
        raise MergestreamError(f"{path} exists already and is not empty; choose another place for the store")
    work = path.resolve().with_name(f".{path.name}.pull")
    try:
        _download(name, revision or None, work)
        store = open_store(work)
        if base is not None:
            store.relocate(base)
        store.verify(base=False)
        for part in (*work.rglob("*"), work):
            sync_file(part)
        work.rename(path)
        sync_directory(work.parent)
    except OSError as error:
        raise MergestreamError(f"{path} was not pulled: {error.strerror or error}") from error


def _download(name: str, revision: str | None, work: Path) -> None:
    """Download the files of a store, and nothing else from the repository."""
    api = connect(name)
    with explained(f"{name}@{revision}" if revision else name, "pulled"):
        found = api.model_info(name, revision=revision)
        files = [sibling.rfilename for sibling in found.siblings or []]
        wanted = [file for file in files if _PART.fullmatch(file)]
        if MANIFEST not in wanted:
            raise MergestreamError(f"{name} holds no store; to merge a model from the hub, name it as {name}")
        work.mkdir(parents=True, exist_ok=True)
        api.snapshot_download(name, revision=found.sha, local_dir=work, allow_patterns=wanted)
    shutil.rmtree(work / ".cache", ignore_errors=True)
    for path in work.rglob("*"):
        if not path.is_dir() and path.relative_to(work).as_posix() not in wanted:
            path.unlink()  # of another commit, by an interrupted pull
