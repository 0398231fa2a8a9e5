"""Servers of this machine that answer strangely: a bucket and the hub, each with a model that is also a store."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch
from xml.sax.saxutils import escape

from mergestream import Store
from mergestream.checkpoints import open_checkpoint
from mergestream.progress import NoProgress
from tests.faults.inputs import deeply_disturbed, scarred, weights

MOMENT = timedelta(milliseconds=1)
NO_PROXIES = {f"{name}_proxy": "" for name in ("http", "https", "all")}


class Answer(NamedTuple):
    """What a server sends; ``body`` may be another number of bytes than the headers say."""

    status: int
    body: bytes
    headers: dict[str, str]


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], Answer]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            status, body, headers = answer(self)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(b"" if self.command == "HEAD" else body)

        do_HEAD = do_GET  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def disturb_answer(draw: random.Random, answer: Answer) -> Answer:
    status, body, headers = answer
    kind = draw.randrange(6)
    if kind == 0:
        return Answer(draw.choice((200, 204, 206, 301, 302, 304, 400, 401, 403, 404, 412, 416, 500)), body, headers)
    if kind == 1:
        return Answer(status, scarred(draw, body), headers)
    if kind == 2:
        return Answer(status, body + draw.randbytes(draw.choice((1, 100, 1 << 20))), headers)
    if kind == 3:
        return Answer(status, body, {**headers, "Content-Length": draw.choice(("0", "7", "-1", "x", "9" * 30))})
    if kind == 4:
        odd = draw.choice(
            ("", "x", "file:///etc/passwd", '"other"', "bytes 5-9/10", "\N{LATIN SMALL LETTER E WITH ACUTE}")
        )
        return Answer(
            status, body, {**headers, draw.choice(("ETag", "Location", "Content-Range", "X-Repo-Commit")): odd}
        )
    return Answer(status, b"", {})


def seeded(draw: random.Random, place: Path) -> Path:
    """Nothing but a number: the server has the faults."""
    (place / "seed").write_text(str(draw.randrange(2**32)))
    return place


def read_bucket(place: Path) -> None:
    """A model, and the same address as a store, in a bucket that answers strangely."""
    from mergestream.storage import client

    draw = random.Random(int((place / "seed").read_text()))
    objects = {"config.json": b"{}", "model.safetensors": weights(), "manifest.json": b"{}", "README.md": b"x"}
    if draw.random() < 0.4:
        objects[draw.choice(("../x.json", "/etc/x.json", "a//b.json", "1_a/../../x.json", "\N{SNOWMAN}.json"))] = b"{}"
    strange = draw.randrange(1, 6)
    count = 0

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        nonlocal count
        count += 1
        path, _, query = request.path.partition("?")
        found = _listing(draw, objects) if "list-type" in query else _object(objects, path, request.headers["Range"])
        return disturb_answer(draw, found) if count == strange else found

    retries: Any = {"max_retries": 1, "backoff": {"init_backoff": MOMENT, "max_backoff": 2 * MOMENT, "base": 2.0}}
    with serving(answer) as endpoint, patch.object(client, "RETRIES", retries):
        known = NO_PROXIES | {
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
            "AWS_REGION": "z",
            "AWS_ENDPOINT_URL": endpoint,
        }
        with patch.dict(os.environ, known):
            client.open_bucket.cache_clear()
            try:
                with open_checkpoint("s3://bucket/model") as model:
                    for _ in model.companions():
                        pass
                    for name in model.tensors:
                        model.read(name)
                Store("s3://bucket/model", progress=NoProgress())
            finally:
                client.open_bucket.cache_clear()


def _object(objects: dict[str, bytes], path: str, asked: str | None) -> Answer:
    data, headers = (
        objects.get(path.rpartition("/")[2]),
        {"ETag": '"1"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"},
    )
    if data is None:
        return Answer(404, b"", {})
    if not asked:
        return Answer(200, data, headers)
    begin, end = map(int, asked.removeprefix("bytes=").split("-"))
    part = data[begin : end + 1]
    return Answer(206, part, {**headers, "Content-Range": f"bytes {begin}-{begin + len(part) - 1}/{len(data)}"})


def _listing(draw: random.Random, objects: dict[str, bytes]) -> Answer:
    sizes = {name: str(len(data)) for name, data in objects.items()}
    if draw.random() < 0.3:
        sizes[draw.choice(list(sizes))] = draw.choice(("-1", "0", "5", str(2**40), "x", ""))
    rows = "".join(
        f"<Contents><Key>{escape(f'model/{name}')}</Key><Size>{size}</Size><ETag>&quot;1&quot;</ETag>"
        "<LastModified>2015-10-21T07:28:00.000Z</LastModified></Contents>"
        for name, size in sizes.items()
    )
    text = f'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>'
    return Answer(200, text.encode(), {"Content-Type": "application/xml"})


def read_hub(place: Path) -> None:
    """A model, and the same as a store, on a hub that answers strangely."""
    from huggingface_hub import constants, hf_api

    draw = random.Random(int((place / "seed").read_text()))
    commit = draw.choice(("0" * 40, "0" * 40, "../../../outside", "", "x" * 300))
    objects = {"config.json": b"{}", "model.safetensors": weights(), "manifest.json": b"{}"}
    names = [*objects, *(["../x.json", "/etc/x.json", "a/../../x.json"] if draw.random() < 0.3 else [])]
    strange = draw.randrange(1, 8)
    count = 0

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        nonlocal count
        count += 1
        path = request.path.partition("?")[0]
        if path.startswith("/api/"):
            info: Any = {"id": "org/name", "sha": commit, "siblings": [{"rfilename": name} for name in names]}
            if "/tree/" in path:
                info = [{"type": "file", "path": name, "size": 2, "oid": "1"} for name in names]
            if draw.random() < 0.3:
                info = deeply_disturbed(draw, info)
            found = Answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        else:
            found = _object(objects, path, request.headers["Range"])
            found.headers["X-Repo-Commit"] = commit
        return disturb_answer(draw, found) if count == strange else found

    with (
        serving(answer) as endpoint,
        patch("time.sleep"),
        patch.dict(os.environ, NO_PROXIES | {name.upper(): "" for name in NO_PROXIES}),
        patch.object(hf_api.api, "endpoint", endpoint),
        patch.multiple(
            constants,
            ENDPOINT=endpoint,
            HUGGINGFACE_CO_URL_TEMPLATE=f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
            HF_HUB_DISABLE_XET=True,
            HF_HUB_OFFLINE=False,
            HF_HUB_CACHE=str(place / "cache"),
        ),
    ):
        with open_checkpoint("org/name") as model:
            for name in model.tensors:
                model.read(name)
        Store.pull("hf://org/name", place / "store")
