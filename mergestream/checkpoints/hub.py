"""Models on the Hugging Face hub, downloaded to the cache of huggingface_hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mergestream.checkpoints.layout import CODE, find_weights, is_index, may_go_along, names_code, read_index
from mergestream.checkpoints.unsupported import no_weights_error
from mergestream.errors import MergestreamError, first_line


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
