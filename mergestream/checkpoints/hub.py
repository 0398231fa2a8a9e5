"""The Hugging Face hub: its client, its errors as sentences, and models downloaded to the cache of huggingface_hub."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.checkpoints.layout import (
    CODE,
    find_weights,
    is_index,
    may_go_along,
    names_code,
    no_weights_error,
    read_index,
)
from mergestream.errors import MergestreamError, first_line, package_needed

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_SECRETS = re.compile(r"hf_\w+|\?\S+")
"""Tokens, and signatures in URLs"""
LOGIN = "log in with `hf auth login`"
UPLOAD = "pushed to"


class UnreachableError(MergestreamError):
    """No network, a proxy, offline mode, or a hub that is out of order."""


def connect(name: str) -> HfApi:
    """A client of the hub, for a repository, without progress bars if nobody sees them."""
    with package_needed(f"{name} is not a local path, and the hub", "hub"):
        from huggingface_hub import HfApi, utils
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    return HfApi()


@contextmanager
def explained(hub_id: str, doing: str) -> Iterator[None]:
    """Raise errors of the hub as one sentence that never quotes the token."""
    from huggingface_hub import utils

    name, _, revision = hub_id.partition("@")
    try:
        yield
    except MergestreamError:
        raise
    except Exception as error:  # each client library has its own types
        status = _status(error)
        if isinstance(error, utils.GatedRepoError):
            sentence = f"{name} is gated: accept its terms on the hub and {LOGIN}"
        elif isinstance(error, utils.RevisionNotFoundError):
            sentence = f"the hub knows {name}, but not the revision {revision}"
        elif isinstance(error, utils.RepositoryNotFoundError | utils.HFValidationError) and doing != UPLOAD:
            sentence = f"{hub_id} is no local path, and the hub does not show it; check the spelling, or {LOGIN}"
        elif status == 401:
            sentence = f"the hub does not accept the token; {LOGIN} with another"
        elif status == 403:
            sentence = f"the token may not write to {name}; use one with write access to {name.partition('/')[0]}"
        else:
            reason = f"the hub answered {status}" if status else _SECRETS.sub("…", first_line(error))
            raise UnreachableError(f"{hub_id} cannot be {doing} ({reason}); run the command again to resume") from error
        raise MergestreamError(sentence) from error


def _status(error: BaseException | None) -> int | None:
    """The HTTP status of an error, or of the errors that caused it."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return int(response.status_code)
        error = error.__cause__
    return None


def download(hub_id: str, *, weights: bool = True) -> tuple[Path, str]:
    """Download ``org/name[@revision]``; returns the local snapshot and its identity ``org/name@commit``.

    Without ``weights`` only the configuration and its companions are downloaded.
    """
    repo, _, revision = hub_id.partition("@")
    api, version = connect(hub_id), revision or None
    try:
        with explained(hub_id, "downloaded from the hub"):
            info = api.model_info(repo, revision=version)
            files = [sibling.rfilename for sibling in info.siblings or []]
            wanted = [name for name in files if may_go_along(name)]
            if weights:
                wanted += _weights(api, hub_id, [name for name in files if "/" not in name])
            snapshot = Path(api.snapshot_download(repo, revision=version, allow_patterns=wanted))
            code = [name for name in files if name.endswith(CODE)]
            if code and names_code(snapshot):
                api.snapshot_download(repo, revision=version, allow_patterns=code)
    except UnreachableError as error:
        if (found := cached(hub_id)) is None:
            raise MergestreamError(f"{hub_id} is no local path and not in the hub's cache; {error}") from error
        snapshot = found
    return snapshot, f"{repo}@{snapshot.name}"


def _weights(api: HfApi, hub_id: str, files: list[str]) -> list[str]:
    """The weight files that are needed to open the snapshot, with their index."""
    if "adapter_config.json" in files:
        return [name for name in files if name.startswith("adapter_model.")]
    entry = find_weights(files, hub_id)
    if entry is None:
        raise no_weights_error(files, hub_id)
    if not is_index(entry):
        return [entry]
    repo, _, revision = hub_id.partition("@")
    index = Path(api.hf_hub_download(repo, entry, revision=revision or None))
    return [entry, *sorted(set(read_index(index).values()))]


def cached(hub_id: str) -> Path | None:
    """The snapshot in the local cache, which may lack files; None if there is none."""
    repo, _, revision = hub_id.partition("@")
    try:
        import huggingface_hub as hub

        # Without patterns it would fail for files that were never downloaded.
        return Path(hub.snapshot_download(repo, revision=revision or None, local_files_only=True, allow_patterns=[]))
    except Exception:  # not installed or not cached: every version has its own types
        return None
