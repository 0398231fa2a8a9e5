"""Checkpoints from the Hugging Face hub, through huggingface_hub and its cache."""

from __future__ import annotations

from pathlib import Path

from mergestream.checkpoints.layout import CODE, find_weights, is_index, may_go_along, names_code, read_index
from mergestream.checkpoints.strangers import no_weights
from mergestream.errors import MergestreamError


def download(hub_id: str, *, weights: bool = True) -> tuple[Path, str]:
    """The local snapshot of ``org/name[@revision]``, and its exact identity ``org/name@commit``.

    Without ``weights`` only the configuration and its companions are fetched.
    """
    repo, _, revision = hub_id.partition("@")
    try:
        import huggingface_hub as hub
        from huggingface_hub import utils
    except ImportError as error:
        raise MergestreamError(
            f"{hub_id} is no local path, and for the hub the package huggingface_hub is missing: "
            "pip install 'mergestream[hub]'"
        ) from error
    try:
        info = hub.model_info(repo, revision=revision or None)
        files = [sibling.rfilename for sibling in info.siblings or []]
        beside = [name for name in files if "/" not in name]
        wanted = (_weights(hub_id, beside) if weights else []) + [name for name in files if may_go_along(name)]
        snapshot = Path(hub.snapshot_download(repo, revision=revision or None, allow_patterns=wanted))
        code = [name for name in files if name.endswith(CODE)]
        if code and names_code(snapshot):
            hub.snapshot_download(repo, revision=revision or None, allow_patterns=code)
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
    except Exception as error:  # no network, a proxy, offline mode: each client library has its own types
        found = cached(hub_id)
        if found is None:
            raise MergestreamError(
                f"{hub_id} is no local path, is not in the hub's cache, and cannot be downloaded from the hub "
                f"({(str(error).splitlines() or [''])[0] or type(error).__name__})"
            ) from error
        snapshot = found
    return snapshot, f"{repo}@{snapshot.name}"


def _weights(hub_id: str, files: list[str]) -> list[str]:
    """The weight files that opening the snapshot will want, with their index, and no other variant of them."""
    import huggingface_hub as hub

    if "adapter_config.json" in files:
        return [name for name in files if name.startswith("adapter_model.")]
    entry = find_weights(files, hub_id)
    if entry is None:
        raise no_weights(files, hub_id)
    if not is_index(entry):
        return [entry]
    repo, _, revision = hub_id.partition("@")
    index = Path(hub.hf_hub_download(repo, entry, revision=revision or None))
    return [entry, *sorted(set(read_index(index).values()))]


def cached(hub_id: str) -> Path | None:
    """The snapshot that an earlier run has downloaded, or some of it; opening it tells if a file is missing."""
    repo, _, revision = hub_id.partition("@")
    try:
        import huggingface_hub as hub

        # No patterns, since the hub would count files as missing that were never wanted.
        return Path(hub.snapshot_download(repo, revision=revision or None, local_files_only=True, allow_patterns=[]))
    except Exception:  # not installed, or not in the cache: each version has its own types
        return None
