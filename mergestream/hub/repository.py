"""A repository on the hub that is written to: one commit a push, so that others see all of it or nothing.

What was uploaded before a push broke off is known to the hub by its content, so that the next one goes on from there.
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
"""Tokens, and the signatures of addresses"""
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def repository_name(address: str) -> str:
    """``ORG/NAME`` of what a user writes so, or as ``hf://ORG/NAME``."""
    name = address.removeprefix("hf://")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{address} is no repository of the hub: write hf://ORG/NAME")
    return name


def check_login() -> None:
    """Refuse to begin what could not be pushed: without the package, or without a token."""
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
    """Have the repository hold these files, by the names that they are to have there; returns its address.

    Others that are there stay, unless ``is_ours`` says that an earlier push has left them; ``check`` may refuse what it
    finds there. One that is new is private where that is asked for; one that is public is never filled with what was to
    be private.
    """
    check_login()
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    with explained(name, "pushed to"):
        api = connect()
        address = str(api.create_repo(name, private=private or None, exist_ok=True))
        found = api.model_info(name)
        if private and not found.private:
            raise MergestreamError(f"{name} is there, and public: make it private on the hub, or push elsewhere")
        present = {sibling.rfilename for sibling in found.siblings or []}
        check(present)
        added = [CommitOperationAdd(there, here) for there, here in files.items()]
        left = [CommitOperationDelete(there) for there in sorted(present - files.keys()) if is_ours(there)]
        api.create_commit(name, [*left, *added], commit_message=message)
    return address


def connect() -> HfApi:
    package = _package()
    if not sys.stderr.isatty():  # nobody watches bars
        package.utils.disable_progress_bars()
    return package.HfApi()


def _package() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MergestreamError(
            "for the hub the package huggingface_hub is missing: pip install 'mergestream[hub]'"
        ) from error
    return huggingface_hub


@contextmanager
def explained(name: str, doing: str) -> Iterator[None]:
    """What the hub has against it, in a sentence, and nothing of the token."""
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
            sentence = f"{name} cannot be {doing} ({reason}); try again, and it goes on where it was"
        raise MergestreamError(sentence) from error


def _status(error: BaseException | None) -> int | None:
    """Of the answer that it is about, be it by the way of another error."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return int(response.status_code)
        error = error.__cause__
    return None


def _reason(error: BaseException) -> str:
    status = _status(error)
    return f"the hub answered {status}" if status else _SECRETS.sub("…", first_line(error))
