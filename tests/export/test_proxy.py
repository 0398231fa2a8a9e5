"""The example that routes requests, with a stub in place of the server that holds the adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from mergestream.routed import Route
from tests.conftest import load_script

SCRIPT = Path(__file__).parents[2] / "examples" / "routed" / "proxy.py"


@pytest.fixture(scope="module")
def proxy() -> ModuleType:
    return load_script(SCRIPT)


class Stub(BaseHTTPRequestHandler):
    """Answers with what it was asked."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(418 if asked.get("model") == "merged" else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"path": self.path, "key": self.headers.get("Authorization"), **asked}).encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": ["legal"]}')


class Model:
    """Routes by the word law; is unsure about an empty text."""

    experts = ("legal", "medical")
    processor = SimpleNamespace(chat_template=None)

    def route(self, inputs: list[dict[str, Any]]) -> list[Route]:
        text = inputs[0]["text"]
        expert = "legal" if "law" in text else "medical"
        return [Route(expert, 0.9, expert if text else "merged")]


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def address(proxy: ModuleType) -> Iterator[str]:
    with (
        running(ThreadingHTTPServer(("127.0.0.1", 0), Stub)) as upstream,
        running(proxy.serve(proxy.Router(Model()), upstream, 0)) as address,
    ):
        yield address


def ask(address: str, body: Any, path: str = "/v1/completions") -> tuple[dict[str, Any], str | None]:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
    with urlopen(Request(address + path, json.dumps(body).encode(), headers), timeout=10) as answer:
        return json.loads(answer.read()), answer.headers["X-Adapter"]


def test_requests_go_to_the_adapter_of_their_prompt(address: str) -> None:
    answer, adapter = ask(address, {"model": "auto", "prompt": "what is the law", "stream": False})
    assert adapter == answer["model"] == "legal"
    assert answer["path"] == "/v1/completions" and answer["key"] == "Bearer key" and answer["stream"] is False
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "a broken leg"}]
    answer, adapter = ask(address, {"model": "auto", "messages": messages}, "/v1/chat/completions")
    assert adapter == answer["model"] == "medical" and answer["messages"] == messages


def test_an_adapter_that_is_named_and_other_paths_are_not_routed(address: str) -> None:
    assert ask(address, {"model": "medical", "prompt": "what is the law"})[1] == "medical"
    answer, adapter = ask(address, {"model": "auto", "input": "law"}, "/v1/embeddings")
    assert adapter is None and answer["model"] == "auto"
    with urlopen(f"{address}/v1/models", timeout=10) as listed:
        assert json.loads(listed.read()) == {"data": ["legal"]}


def test_errors_are_answers(address: str, proxy: ModuleType) -> None:
    with pytest.raises(HTTPError) as refused:
        ask(address, {"model": "auto", "prompt": ""})
    assert refused.value.code == 418 and refused.value.headers["X-Adapter"] == "merged"
    bodies: tuple[Any, ...] = ({"model": "auto"}, [], {"messages": "law"})
    for body in bodies:
        with pytest.raises(HTTPError) as refused:
            ask(address, body)
        assert refused.value.code == 400
        assert "cannot be routed" in json.loads(refused.value.read())["error"]["message"]
    with running(proxy.serve(proxy.Router(Model()), "http://127.0.0.1:9", 0)) as alone:
        with pytest.raises(HTTPError) as refused:
            ask(alone, {"prompt": "law"})
        assert refused.value.code == 502
