"""A server on this machine that speaks S3, and one before it that loses, cuts and delays what goes through."""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import obstore
    from obstore.store import S3Config
else:
    obstore = pytest.importorskip("obstore")
moto = pytest.importorskip("moto.server")

SECRET = "thisisasecretofthetests"
BUCKET = "models"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AKIDOFTHETESTS", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
"""Never without them: who has none in its environment may go and ask the machine for some."""


@contextmanager
def serve() -> Iterator[str]:
    """Yields the endpoint; `BUCKET` is there, and empty."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    connection = http.client.HTTPConnection(host, port)
    connection.request("PUT", f"/{BUCKET}")
    assert connection.getresponse().status == 200
    yield f"http://{host}:{port}"
    server.stop()


def opened(endpoint: str, bucket: str = BUCKET) -> obstore.store.S3Store:
    """The bucket as others see it."""
    config: S3Config = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": "x",
        "secret_access_key": "y",
    }
    return obstore.store.S3Store(bucket, config=config, client_options={"allow_http": True})


def upload(bucket: obstore.store.S3Store, directory: Path, key: str) -> str:
    """Copies a directory, and yields its address."""
    for path in directory.rglob("*"):
        if path.is_file():
            obstore.put(bucket, f"{key}/{path.relative_to(directory)}", path.read_bytes())
    return f"s3://{BUCKET}/{key}"


@dataclass
class Trouble:
    """What happens to which request, by its number from 1 on."""

    refused: Callable[[int], bool] = lambda number: False
    """Answered by an error of the server"""
    cut: Callable[[int], bool] = lambda number: False
    """Half of an object, then nothing; obstore does not ask again for a listing or an error that breaks off"""
    lost: Callable[[int], bool] = lambda number: False
    """Done, and not answered"""
    whole: bool = False
    """Whether an object is sent as a whole where a range was asked for: by status 200"""
    unconditional: bool = False
    """Whether an object is put whatever is there, as some services do"""
    seconds: float = 0
    """Before an answer"""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Of all that came: the method and path, and the range that was asked for"""
    received: int = 0
    """Bytes of bodies that were passed on"""


@contextmanager
def disturbed(endpoint: str, trouble: Trouble) -> Iterator[str]:
    """Yields another endpoint of the same server."""
    counting = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def pass_on(self) -> None:
            with counting:
                trouble.requests.append((f"{self.command} {self.path}", self.headers.get("Range", "")))
                number = len(trouble.requests)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            time.sleep(trouble.seconds)
            if trouble.refused(number):
                self.send_response(503, "Slow Down")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
            headers = dict(self.headers)
            ignored = ("if-",) * trouble.unconditional + ("range",) * trouble.whole
            headers = {name: value for name, value in headers.items() if not name.lower().startswith(ignored)}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            if trouble.lost(number):
                self.close_connection = True
                return None
            self.send_response(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                    self.send_header(name, value)
            length = answer.headers["Content-Length"] if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            if trouble.cut(number) and answer.status < 300 and "list-type" not in self.path:
                content, self.close_connection = content[: len(content) // 2], True
            self.wfile.write(content)
            with counting:
                trouble.received += len(content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
