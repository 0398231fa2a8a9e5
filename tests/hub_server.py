"""A server on this machine that speaks as much of the hub's protocol as downloads and uploads need."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"
REVISIONS = {"main": COMMIT, "refs/convert/parquet": COMMIT, "other": OTHER}

Files = dict[str, bytes]
Repositories = Mapping[str, Mapping[str, Files]]
"""Files by commit by repository; the name of a data set begins with ``datasets/``."""
TOKEN = "hf_thisisasecretofthetests"
LARGE = (".safetensors", ".png")
"""What is kept as LFS keeps it; of all else the content comes with the commit."""


@dataclass
class Uploads:
    """Who may write what, and what has come so far."""

    writable: Collection[str] = ("org",)
    """The organisations that the one token may write to"""
    private: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    """What was uploaded, by SHA-256, whether or not a commit speaks of it"""
    received: list[str] = field(default_factory=list)
    """The SHA-256 of every upload, in order"""
    commits: int = 0
    refuse: Callable[[str], bool] = lambda path: False
    """Whether a request to a path is to fail"""


@contextmanager
def serve(repositories: Repositories, gated: Collection[str] = (), uploads: Uploads | None = None) -> Iterator[str]:
    """Yields the endpoint. Repositories may be added meanwhile; files of ``gated`` ones are refused."""
    handler = _handler_for(repositories, gated)
    if uploads is not None:
        handler = _taking(handler, repositories, uploads)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
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
                siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                info = {"id": repo, "sha": commit, "siblings": siblings}
                return self.reply(200, json.dumps(info).encode())
            if repo in gated:
                return self.reply(403, X_Error_Code="GatedRepo")
            data = files.get("/".join(name))
            if data is None:
                return self.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                return self.reply(206, data[int(asked[1]) : int(asked[2]) + 1])
            return self.reply(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit)

        do_HEAD = do_GET  # noqa: N815

    return Handler


def _taking(handler: type[Any], repositories: Any, uploads: Uploads) -> type[BaseHTTPRequestHandler]:
    """The same for one that takes uploads: repositories are made, and committed to."""

    class Taking(handler):  # type: ignore[misc]
        def body(self) -> bytes:
            return bytes(self.rfile.read(int(self.headers["Content-Length"] or 0)))

        def answer(self, data: Any, status: int = 200) -> None:
            self.reply(status, json.dumps(data).encode(), Content_Type="application/json")

        def do_GET(self) -> None:  # noqa: N802
            if uploads.refuse(self.path):
                self.reply(410)
                return
            if self.path.startswith("/api/models/") and "/revision/" not in self.path and "/tree/" not in self.path:
                repo = urlsplit(self.path).path.removeprefix("/api/models/")
                if repo in repositories:
                    names = [{"rfilename": name} for name in repositories[repo][COMMIT]]
                    return self.answer(
                        {"id": repo, "sha": COMMIT, "private": repo in uploads.private, "siblings": names}
                    )
            super().do_GET()

        def do_HEAD(self) -> None:  # noqa: N802
            super().do_GET()

        def do_PUT(self) -> None:  # noqa: N802
            data = self.body()
            oid = self.path.rpartition("/")[2]
            assert "Authorization" not in self.headers, "storage is no business of the token"
            if uploads.refuse(self.path):
                self.reply(410)
                return
            assert hashlib.sha256(data).hexdigest() == oid
            uploads.objects[oid] = data
            uploads.received.append(oid)
            self.reply(200, ETag=f'"{oid}"')

        def do_POST(self) -> None:  # noqa: N802
            content, path = self.body(), urlsplit(self.path).path
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer({"error": "Invalid credentials in Authorization header"}, 401)
            if uploads.refuse(path):
                return self.answer({"error": "broken"}, 410)
            if path == "/api/validate-yaml":
                return self.answer({"errors": [], "warnings": []})
            if path == "/api/repos/create":
                return self.create(json.loads(content))
            if path.endswith(".git/info/lfs/objects/batch"):
                return self.batch(json.loads(content))
            repo = "/".join(path.removeprefix("/api/models/").split("/")[:2])
            if repo.partition("/")[0] not in uploads.writable:
                return self.answer({"error": "You don't have the required permissions"}, 403)
            if "/preupload/" in path:
                return self.preupload(json.loads(content))
            self.commit(repo, [json.loads(line) for line in content.splitlines()])

        def create(self, asked: dict[str, Any]) -> None:
            repo = f"{asked['organization']}/{asked['name']}"
            if asked["organization"] not in uploads.writable:
                return self.answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
            url = f"http://{self.headers['Host']}/{repo}"
            if repo in repositories:
                return self.answer({"error": "You already created this model repo", "url": url}, 409)
            repositories[repo] = {COMMIT: {".gitattributes": b""}}
            if asked.get("private") or asked.get("visibility") == "private":
                uploads.private.add(repo)
            self.answer({"url": url})

        def preupload(self, asked: dict[str, Any]) -> None:
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in asked["files"]
            ]
            self.answer({"files": modes})

        def batch(self, asked: dict[str, Any]) -> None:
            def action(wanted: dict[str, Any]) -> dict[str, Any]:
                if wanted["oid"] in uploads.objects:
                    return wanted
                return {**wanted, "actions": {"upload": {"href": f"http://{self.headers['Host']}/lfs/{wanted['oid']}"}}}

            self.answer({"transfer": "basic", "objects": [action(wanted) for wanted in asked["objects"]]})

        def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
            files = repositories[repo][COMMIT]
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = uploads.objects[value["oid"]]
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            uploads.commits += 1
            url = f"http://{self.headers['Host']}/{repo}/commit/{COMMIT}"
            self.answer({"commitUrl": url, "commitOid": COMMIT})

    return Taking
