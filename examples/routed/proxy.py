"""Route OpenAI-style requests to the adapters of a server that takes them by name (vLLM, LoRAX).

    mergestream export store served --format routed --for vllm
    vllm serve BASE --enable-lora --lora-modules legal=served/experts/legal … merged=served/merged
    python examples/routed/proxy.py served http://127.0.0.1:8000 --port 8080

A request whose ``model`` is one of the adapters is forwarded as it is. Any other gets the adapter of the expert that
its prompt looks like as its ``model``; the answer's header ``X-Adapter`` says which.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from mergestream import MergestreamError, RoutedModel

TIMEOUT = 600
ROUTED = ("/v1/chat/completions", "/v1/completions")


class Router:
    """Chooses the adapter of a request."""

    def __init__(self, model: RoutedModel) -> None:
        self.model, self.lock = model, Lock()

    def choose(self, request: dict[str, Any]) -> str:
        if request.get("model") in (*self.model.experts, "merged"):
            return str(request["model"])
        if messages := request.get("messages"):
            has_template = getattr(self.model.processor, "chat_template", None)
            text = "\n".join(str(message["content"]) for message in messages)
            prompt = {"messages": messages} if has_template else {"text": text}
        else:
            prompt = {"text": request["prompt"]}
        with self.lock:  # the model serves one call at a time
            return self.model.route([prompt])[0].adapter


def serve(router: Router, upstream: str, port: int) -> ThreadingHTTPServer:
    """A server on the loopback interface that forwards to ``upstream``; run it with ``serve_forever()``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.forward(None)

        def do_POST(self) -> None:
            body, adapter = self.rfile.read(int(self.headers.get("Content-Length", 0))), None
            if self.path in ROUTED:
                try:
                    request = json.loads(body)
                    adapter = request["model"] = router.choose(request)
                    body = json.dumps(request).encode()
                except (MergestreamError, ValueError, LookupError, TypeError, AttributeError) as error:
                    return self.fail(400, f"the request cannot be routed: {error}")
            self.forward(body, adapter)

        def forward(self, body: bytes | None, adapter: str | None = None) -> None:
            """Send the request on, and its answer back piece by piece, so that streams stay streams."""
            headers = {name: self.headers[name] for name in ("Content-Type", "Authorization") if name in self.headers}
            try:
                answer: Any = urlopen(Request(upstream + self.path, body, headers), timeout=TIMEOUT)
            except HTTPError as error:
                answer = error  # an answer as well
            except URLError as error:
                return self.fail(502, f"{upstream} does not answer: {error.reason}")
            with answer:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
                if adapter:
                    self.send_header("X-Adapter", adapter)
                self.end_headers()
                while piece := answer.read1():
                    self.wfile.write(piece)

        def fail(self, status: int, message: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"message": message}}).encode())

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="what export --format routed has written")
    parser.add_argument("upstream", help="the server with the adapters, such as http://127.0.0.1:8000")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    serve(Router(RoutedModel.from_pretrained(options.directory)), options.upstream, options.port).serve_forever()
