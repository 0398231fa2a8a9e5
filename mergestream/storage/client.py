"""Requests to a bucket through obstore: credentials, retries, and failures as errors of ours."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from mergestream.errors import MergestreamError, package_needed

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

Result = TypeVar("Result")

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
RETRIES: RetryConfig = {
    "max_retries": 8,
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=15), "base": 2.0},
}
"""For half a minute in all, by obstore"""


_REFUSALS = {
    403: "may not be read or written with the credentials in the environment; check them",
    404: "does not exist",
    412: "has changed since it was opened; start again",
}


def request(what: str, ask: Callable[[], Result], done: str = "read") -> Result:
    """Make a request, and raise its failure as an error about ``what`` that cannot be ``done``."""
    from obstore import exceptions

    try:
        return ask()
    except FileNotFoundError:
        status: int | None = 404
    except exceptions.PreconditionError:
        status = 412
    except (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        status = 403
    except exceptions.GenericError as error:
        status = http_status(error)
    except exceptions.BaseError:
        status = 400
    raise _service_error(what, status, done)


def _service_error(what: str, status: int | None, done: str) -> MergestreamError:
    """The error for an HTTP status, None for a lost connection. It never quotes the service, which may repeat a token.

    If the service is not available, the cause is a ConnectionError: `watch` tries again.
    """
    if status is None or status >= 500 or status in (408, 429):
        reason = f"the service is not available (HTTP {status})" if status else "no answer, or one that broke off"
        error = MergestreamError(f"{what} cannot be {done}: {reason}; try again later")
        error.__cause__ = ConnectionError(reason)
        return error
    refusal = _REFUSALS.get(403 if status == 401 else status)
    return MergestreamError(f"{what} {refusal}" if refusal else f"{what}: the service refuses this (HTTP {status})")


@cache
def open_bucket(scheme: str, bucket: str) -> ObjectStore:
    """A client of obstore, which reads its configuration from the environment and retries by itself."""
    with package_needed(f"{scheme}://{bucket}", "cloud"):
        from obstore.store import from_url
    if not any(all(map(_is_set, way.split("+"))) for way in _CREDENTIALS[scheme]):
        # Without this check obstore would ask the metadata service of the machine.
        own, public, *_ = (way.replace("+", " and ") for way in _CREDENTIALS[scheme])
        remedy = f"set {own}, or for a public bucket {public}=true"
        raise MergestreamError(f"for {scheme}://{bucket} there are no credentials in the environment: {remedy}")
    options: ClientConfig = {"allow_http": True}  # used only if an endpoint in the environment is plain HTTP
    return from_url(f"{scheme}://{bucket}", client_options=options, retry_config=RETRIES)


def http_status(error: Exception) -> int | None:
    """The HTTP status that obstore reports; None for a lost connection."""
    found = re.search(r"status code: (\d{3})\b", str(error))
    return int(found[1]) if found else None


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() not in ("", "0", "false")
