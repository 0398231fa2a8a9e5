"""Models on the Hugging Face hub: downloaded to the cache of huggingface_hub, or read by range."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.checkpoints.layout import CODE, find_weights, is_index, may_go_along, names_code, read_index
from mergestream.checkpoints.unsupported import no_weights_error
from mergestream.errors import MergestreamError, first_line
from mergestream.storage import StoredFile, Url
from mergestream.storage.client import service_error

_TIMEOUT = 30
"""Seconds"""


def download(hub_id: str, *, weights: bool = True) -> tuple[Path, str]:
    """Download ``org/name[@revision]``; returns the local snapshot and its identity ``org/name@commit``.

    Without ``weights`` only the configuration and its companions are downloaded.
    """
    repo, _, revision = hub_id.partition("@")
    try:
        with _hub_errors_explained(hub_id):
            import huggingface_hub as hub

            info = hub.model_info(repo, revision=revision or None)
            files = [sibling.rfilename for sibling in info.siblings or []]
            beside = [name for name in files if "/" not in name]
            wanted = (_weights(hub_id, beside) if weights else []) + [name for name in files if may_go_along(name)]
            snapshot = Path(hub.snapshot_download(repo, revision=revision or None, allow_patterns=wanted))
            code = [name for name in files if name.endswith(CODE)]
            if code and names_code(snapshot):
                hub.snapshot_download(repo, revision=revision or None, allow_patterns=code)
    except _UnreachableError as error:
        found = cached(hub_id)
        if found is None:
            raise MergestreamError(
                f"{hub_id} is not a local path or in the hub's cache, and cannot be downloaded from the hub ({error})"
            ) from error
        snapshot = found
    return snapshot, f"{repo}@{snapshot.name}"


class _UnreachableError(Exception):
    """The hub cannot be reached: no network, a proxy, offline mode."""


@contextmanager
def _hub_errors_explained(hub_id: str) -> Iterator[None]:
    """Raise errors of the hub as a sentence about the model."""
    repo, _, revision = hub_id.partition("@")
    try:
        from huggingface_hub import utils
    except ImportError as error:
        raise MergestreamError(
            f"{hub_id} is not a local path, and models on the hub need the package huggingface_hub: "
            "pip install 'mergestream[hub]'"
        ) from error
    try:
        yield
    except MergestreamError:
        raise
    except utils.GatedRepoError as error:
        raise MergestreamError(
            f"{hub_id} is gated: accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except utils.RevisionNotFoundError as error:
        raise MergestreamError(f"{hub_id}: the hub knows {repo}, but not the revision {revision}") from error
    except (utils.RepositoryNotFoundError, utils.HFValidationError) as error:
        raise MergestreamError(
            f"{hub_id} is neither a local path nor a repository that the hub shows you; "
            "check the spelling, or log in with `hf auth login` if it is private"
        ) from error
    except Exception as error:  # each client library has its own types
        raise _UnreachableError(first_line(error)) from error


@dataclass(frozen=True)
class HubCommit:
    """A commit of a repository whose files are read by range."""

    url: Url
    """``hf://org/name@commit``"""

    def __str__(self) -> str:
        return str(self.url)

    def read_range(self, file: StoredFile, begin: int, end: int) -> bytes:
        import huggingface_hub as hub
        from huggingface_hub import utils

        name, _, commit = self.url.key.partition("@")
        address = hub.hf_hub_url(f"{self.url.bucket}/{name}", file.key, revision=commit)
        headers = {**utils.build_hf_headers(), "Range": f"bytes={begin}-{end - 1}"}
        answer: Any
        try:
            answer = utils.http_backoff("GET", address, headers=headers, timeout=_TIMEOUT)
        except Exception as error:  # each client library has its own types
            answer = getattr(error, "response", None)
        status = answer.status_code if answer is not None else None
        if status not in (200, 206):
            raise service_error(str(file), status)
        return bytes(answer.content)


def list_commit(hub_id: str) -> tuple[Url, dict[str, StoredFile]]:
    """The present commit of ``org/name[@revision]``, and its files."""
    repo, _, revision = hub_id.partition("@")
    try:
        with _hub_errors_explained(hub_id):
            import huggingface_hub as hub

            info = hub.model_info(repo, revision=revision or None, files_metadata=True)
    except _UnreachableError as error:
        raise MergestreamError(f"hf://{hub_id} cannot be read from the hub ({error})") from error
    owner, _, name = repo.partition("/")
    commit, tag = HubCommit(Url("hf", owner, f"{name}@{info.sha}")), info.sha or ""
    files = [StoredFile(commit, sibling.rfilename, sibling.size or 0, tag) for sibling in info.siblings or []]
    return commit.url, {file.key: file for file in files}


def _weights(hub_id: str, files: list[str]) -> list[str]:
    """The weight files that are needed to open the snapshot, with their index."""
    import huggingface_hub as hub

    if "adapter_config.json" in files:
        return [name for name in files if name.startswith("adapter_model.")]
    entry = find_weights(files, hub_id)
    if entry is None:
        raise no_weights_error(files, hub_id)
    if not is_index(entry):
        return [entry]
    repo, _, revision = hub_id.partition("@")
    index = Path(hub.hf_hub_download(repo, entry, revision=revision or None))
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
