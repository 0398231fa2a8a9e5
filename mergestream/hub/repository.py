"""Writing to a repository on the hub: one commit per push, so that readers see all of it or nothing.

The hub knows uploaded files by their content. A push that is repeated after an interruption uploads only the rest.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mergestream.errors import MergestreamError, UsageError, first_line

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_SECRETS = re.compile(r"hf_\w+|\?\S+")
"""Tokens, and signatures in URLs"""
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def repository_name(address: str) -> str:
    """Parse ``ORG/NAME`` or ``hf://ORG/NAME``."""
    name = address.removeprefix("hf://")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{address} is not a repository on the hub: write hf://ORG/NAME")
    return name


def check_login() -> None:
    """Raise an error if a push cannot work: without huggingface_hub, or without a token."""
    if not _package().get_token():
        raise MergestreamError(f"there is no token for the hub: {LOGIN}")


def push_files(
    name: str,
    files: Mapping[str, Path],
    *,
    private: bool,
    message: str,
    is_ours: Callable[[str], bool],
    check: Callable[[set[str]], None] = lambda present: None,
) -> str:
    """Upload files under these names in one commit; returns the URL of the repository.

    Files of an earlier push, which ``is_ours`` recognises, are deleted; others stay. ``check`` may refuse a repository
    by its files. ``private`` makes a new repository private, and refuses one that is public.
    """
    check_login()
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    with explained(name, "pushed to"):
        api = connect()
        address = str(api.create_repo(name, private=private or None, exist_ok=True))
        found = api.model_info(name)
        if private and not found.private:
            raise MergestreamError(f"{name} exists and is public: make it private on the hub, or push elsewhere")
        present = {sibling.rfilename for sibling in found.siblings or []}
        check(present)
        added = [CommitOperationAdd(there, here) for there, here in files.items()]
        left = [CommitOperationDelete(there) for there in sorted(present - files.keys()) if is_ours(there)]
        api.create_commit(name, [*left, *added], commit_message=message)
    return address


def connect() -> HfApi:
    """A client of the hub, without progress bars if nobody sees them."""
    package = _package()
    if not sys.stderr.isatty():  # nobody sees progress bars
        package.utils.disable_progress_bars()
    client: HfApi = package.HfApi()
    return client


def _package() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MergestreamError("the hub needs the package huggingface_hub: pip install 'mergestream[hub]'") from error
    return huggingface_hub


@contextmanager
def explained(name: str, doing: str) -> Iterator[None]:
    """Raise errors of the hub as one sentence that never quotes the token."""
    from huggingface_hub import utils

    try:
        yield
    except MergestreamError:
        raise
    except Exception as error:  # no network, a proxy, offline mode: each client library has its own types
        status = _status(error)
        if isinstance(error, utils.RepositoryNotFoundError) and doing != "pushed to":
            sentence = f"the hub shows no {name}; check the spelling, or {LOGIN} if it is private"
        elif isinstance(error, utils.RevisionNotFoundError):
            sentence = f"the hub knows {name}, but not that revision"
        elif status == 401:
            sentence = f"the hub does not accept the token; {LOGIN} with another"
        elif status == 403:
            sentence = f"the token may not write to {name}; use one with write access to {name.partition('/')[0]}"
        else:
            reason = _reason(error)
            sentence = f"{name} cannot be {doing} ({reason}); run the command again, and it resumes"
        raise MergestreamError(sentence) from error


def _status(error: BaseException | None) -> int | None:
    """The HTTP status of an error, or of the errors that caused it."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return int(response.status_code)
        error = error.__cause__
    return None


def _reason(error: BaseException) -> str:
    status = _status(error)
    return f"the hub answered {status}" if status else _SECRETS.sub("…", first_line(error))
