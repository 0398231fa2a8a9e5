"""Requests to a bucket through obstore: credentials, retries, and failures as errors of ours.

Messages of the service are never shown, because they may quote a URL with a token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from mergestream.errors import MergestreamError
from mergestream.storage import transfer
from mergestream.storage.transfer import Result, TransientError, give_up, retry, service_error

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

Default = TypeVar("Default")

_CREDENTIALS = {
    "s3": (
        *("AWS_ACCESS_KEY_ID+AWS_SECRET_ACCESS_KEY", "AWS_SKIP_SIGNATURE"),
        *("AWS_ROLE_ARN+AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ),
    "gs": (
        *("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SKIP_SIGNATURE", "GOOGLE_BEARER_TOKEN"),
        *("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    ),
    "az": tuple(
        f"AZURE_STORAGE_ACCOUNT_NAME+AZURE_{way}"
        for way in ("STORAGE_ACCOUNT_KEY", "SKIP_SIGNATURE", "STORAGE_SAS_TOKEN", "CLIENT_SECRET")
    ),
}
"""Environment variables, one way to authenticate each: the usual one first, then the one for public buckets"""
_STATUS, _RETRIES = re.compile(r"status code: (\d{3})\b"), re.compile(r"after (\d+) retries\b")


def request(what: str, ask: Callable[[], Result], done: str, repeatable: bool) -> Result:
    """Make a request, and raise its failure as an error about ``what``.

    obstore retries requests, but not if the answer breaks off; then a ``repeatable`` one is made again here.
    """
    from obstore import exceptions

    def once() -> Result:
        try:
            return ask()
        except FileNotFoundError:
            raise service_error(what, 404) from None
        except exceptions.PreconditionError:
            raise MergestreamError(f"{what} has changed since it was opened; start again") from None
        except (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
            raise service_error(what, 403) from None
        except exceptions.GenericError as error:
            failure = service_error(what, http_status(error))
            is_final = not repeatable or _number(_RETRIES, error, 0) >= transfer.ATTEMPTS - 1
            if isinstance(failure, TransientError) and is_final:
                raise give_up(what, done, failure) from failure
            raise failure from None
        except exceptions.BaseError:
            raise MergestreamError(f"{what}: the service refuses this") from None

    return retry(what, once, done)


@cache
def open_bucket(scheme: str, bucket: str) -> ObjectStore:
    """A client of obstore, which reads its configuration from the environment and retries by itself."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise MergestreamError(
            f"{scheme}://{bucket} is in object storage, which needs the package obstore: "
            "pip install 'mergestream[cloud]'"
        ) from error
    if not any(all(map(_is_set, way.split("+"))) for way in _CREDENTIALS[scheme]):
        # Without this check obstore would ask the metadata service of the machine.
        own, public, *_ = (way.replace("+", " and ") for way in _CREDENTIALS[scheme])
        raise MergestreamError(
            f"for {scheme}://{bucket} there are no credentials in the environment: set {own}, or for a public bucket "
            f"{public}=true"
        )
    options: ClientConfig = {"allow_http": True}  # used only if an endpoint in the environment is plain HTTP
    return from_url(
        f"{scheme}://{bucket}",
        client_options=options,
        retry_config={
            "max_retries": transfer.ATTEMPTS - 1,
            "backoff": {
                "init_backoff": timedelta(seconds=transfer.FIRST_PAUSE),
                "max_backoff": timedelta(seconds=15),
                "base": 2.0,
            },
        },
    )


def http_status(error: Exception) -> int | None:
    """The HTTP status that obstore reports; None for a lost connection."""
    return _number(_STATUS, error, None)


def _number(pattern: re.Pattern[str], error: Exception, default: Default) -> int | Default:
    found = pattern.search(str(error))
    return int(found[1]) if found else default


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() not in ("", "0", "false")
