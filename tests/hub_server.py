"""A server on this machine that speaks as much of the hub's protocol as a download needs."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"
REVISIONS = {"main": COMMIT, "refs/convert/parquet": COMMIT, "other": OTHER}

Files = dict[str, bytes]
Repositories = Mapping[str, Mapping[str, Files]]
"""Files by commit by repository; the name of a data set begins with ``datasets/``."""


@contextmanager
def serve(repositories: Repositories, gated: Collection[str] = ()) -> Iterator[str]:
    """Yields the endpoint. Repositories may be added meanwhile; files of ``gated`` ones are refused."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_for(repositories, gated))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def environment(endpoint: str, home: Path) -> dict[str, str]:
    """For a process that knows the hub by ``endpoint``: huggingface_hub reads it when it is imported."""
    clean = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and not k.startswith("HF_")}
    return clean | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}


def _handler_for(repositories: Repositories, gated: Collection[str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            api = path.startswith("/api/")
            # A revision may have slashes, which are quoted: split first.
            parts = [unquote(part) for part in path.removeprefix("/api").removeprefix("/models").strip("/").split("/")]
            size = 3 if parts[0] == "datasets" else 2
            repo, rest = "/".join(parts[:size]), parts[size:]
            action, revision, *name = rest if len(rest) > 1 else ("", "main")
            if repo not in repositories:
                return self.reply(401 if api else 404, X_Error_Code="RepoNotFound")
            commit = REVISIONS.get(revision, revision)
            if commit not in repositories[repo]:
                return self.reply(404, X_Error_Code="RevisionNotFound")
            files = repositories[repo][commit]
            if action == "tree":
                listing = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                return self.reply(200, json.dumps(listing).encode())
            if api:
                info = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
                return self.reply(200, json.dumps(info).encode())
            if repo in gated:
                return self.reply(403, X_Error_Code="GatedRepo")
            data = files.get("/".join(name))
            if data is None:
                return self.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return self.reply(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit)

        do_HEAD = do_GET  # noqa: N815

    return Handler
