"""A bucket on this machine that holds the toys, and commands that know of it by their environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import obstore
import pytest

from mergestream.storage.client import RETRIES, open_bucket
from tests.cloud import server as bucket_server
from tests.cloud.server import CREDENTIALS, Trouble, upload
from tests.conftest import Toys


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with bucket_server.serve() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def bucket(server: str, toys: Toys) -> obstore.store.S3Store:
    found = bucket_server.opened(server)
    for directory in (toys.base, *toys.experts):
        upload(found, directory, directory.name)
    return found


@pytest.fixture(autouse=True)
def environment(bucket: object, server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Lets this process know a server; gives a function that has it know another one."""

    def use(endpoint: str) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        open_bucket.cache_clear()

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(RETRIES["backoff"], "init_backoff", timedelta(seconds=0.001))
    use(server)
    yield use
    open_bucket.cache_clear()


@pytest.fixture
def troubled(server: str, environment: Callable[[str], None]) -> Iterator[Trouble]:
    trouble = Trouble()
    with bucket_server.disturbed(server, trouble) as endpoint:
        environment(endpoint)
        yield trouble
