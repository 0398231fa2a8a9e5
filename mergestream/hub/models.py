"""Pushing an export to the hub."""

from __future__ import annotations

from pathlib import Path

from mergestream.errors import MergestreamError
from mergestream.export.places import is_export
from mergestream.hub.repository import push_files, repository_name
from mergestream.hub.stores import holds_store
from mergestream.storage import local_path, open_storage


def push_model(export: str | Path, address: str, *, private: bool = False) -> str:
    """Upload an export with its card and recipe; returns the URL of the repository.

    Weights of an earlier push that this export does not have are deleted; other files in the repository stay.
    """
    name, place = repository_name(address), local_path(export)
    if not is_export(open_storage(place)):
        raise MergestreamError(f"{place} is neither a store nor an export of mergestream; there is nothing to push")

    def check(present: set[str]) -> None:
        if holds_store(present):
            raise MergestreamError(f"{name} holds a store; push the model elsewhere")

    files = {path.relative_to(place).as_posix(): path for path in sorted(place.rglob("*")) if path.is_file()}
    return push_files(
        name, files, private=private, message="A merged model, by mergestream", is_ours=_is_weights, check=check
    )


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json"))
