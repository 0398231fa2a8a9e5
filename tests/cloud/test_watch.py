"""Experts that appear in a bucket are absorbed when all of them is there, each once, the oldest first."""

from __future__ import annotations

import json
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import obstore
import pytest
from moto.s3.models import s3_backends
from safetensors.torch import save
from torch import Tensor

from mergestream import Store
from mergestream.cli.watch import RETRY_SECONDS, Watcher
from mergestream.progress import TerminalProgress
from mergestream.storage import open_storage
from tests.cloud.server import BUCKET, Trouble, upload
from tests.conftest import RunCommand, Toys, save_model, toy_expert


class Bench:
    """A store, and a folder in the bucket that is watched for it; time goes by when it is told to."""

    def __init__(self, place: Path, base: Path, bucket: obstore.store.S3Store) -> None:
        self.place, self.bucket, self.folder, self.now = place, bucket, f"{place.name}/incoming", 0.0
        self.url = f"s3://{BUCKET}/{self.folder}"
        self.store = Store.create(place / "store", base, "average", progress=TerminalProgress())
        self.watcher = self.watch()

    def watch(self) -> Watcher:
        store = Store(self.store.path, progress=TerminalProgress())
        self.watcher = Watcher(store, self.url, {}, clock=lambda: self.now)
        return self.watcher

    def look(self, times: int = 3) -> list[str]:
        """The names of all experts after so many looks."""
        for _ in range(times):
            self.watcher.look()
        return [entry.name for entry in Store(self.store.path).history]

    def bring(self, name: str, seed: int) -> None:
        upload(self.bucket, save_model(self.place / name, toy_expert(seed)), f"{self.folder}/{name}")

    def put(self, name: str, data: bytes) -> None:
        obstore.put(self.bucket, f"{self.folder}/{name}", data)


@pytest.fixture
def bench(tmp_path: Path, toys: Toys, bucket: obstore.store.S3Store) -> Bench:
    return Bench(tmp_path, toys.base, bucket)


def put_at(key: str, year: int) -> None:
    """As if it had been put then."""
    (backend,) = s3_backends["123456789012"].values()
    backend.buckets[BUCKET].keys[key].last_modified = datetime(year, 1, 1, tzinfo=UTC)


def test_folders_and_files_are_absorbed_oldest_first(bench: Bench) -> None:
    bench.bring("one", 1)
    bench.put("two.safetensors", save(toy_expert(2)))
    bench.bring("three", 3)
    bench.put(".hidden/model.safetensors", b"nonsense")
    bench.put("one/config.json", b"{}")
    for key, year in {"one/config.json": 2001, "one/model.safetensors": 2004, "two.safetensors": 2003}.items():
        put_at(f"{bench.folder}/{key}", year)
    assert bench.look(1) == []
    assert bench.look(1) == ["two", "one", "three"]
    assert bench.look() == ["two", "one", "three"]
    assert Store(bench.store.path).history[1].source == f"{bench.url}/one"


def test_an_upload_that_is_not_complete_is_refused_until_it_changes(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    index: dict[str, dict[str, str]] = {"weight_map": {}}
    shards: dict[str, dict[str, Tensor]] = {
        "model-00001-of-00002.safetensors": {},
        "model-00002-of-00002.safetensors": {},
    }
    for number, (name, tensor) in enumerate(toy_expert(1).items()):
        shard = list(shards)[number % 2]
        index["weight_map"][name], shards[shard][name] = shard, tensor
    for name, data, words in [
        ("config.json", b"{}", "holds no checkpoint"),
        (first := min(shards), save(shards[first]), "but no index"),
        ("model.safetensors.index.json", json.dumps(index).encode(), "model-00002-of-00002.safetensors"),
    ]:
        bench.put(f"slow/{name}", data)
        assert bench.look(4) == []
        told = capsys.readouterr().err
        assert told.startswith("error: slow: ") and words in told
        assert told.count("\n") == 1
    bench.put(f"slow/{max(shards)}", save(shards[max(shards)]))
    assert bench.look(1) == [], "it has changed"
    assert bench.look(1) == ["slow"]


def test_a_network_that_is_away_is_waited_for(
    bench: Bench, capsys: pytest.CaptureFixture[str], troubled: Trouble
) -> None:
    bench.bring("one", 1)
    bench.look(1)
    troubled.refused = lambda number: True
    assert bench.look() == []
    assert capsys.readouterr().err.count("\n") == 1, "it is told once"
    listings = len(troubled.requests) + 1
    troubled.refused = lambda number: number > listings
    assert bench.look(1) == []
    assert "next attempt in 600 s" in capsys.readouterr().err
    troubled.refused = lambda number: False
    assert bench.look(1) == []
    bench.now = RETRY_SECONDS
    assert bench.look(1) == ["one"]


def test_what_was_taken_back_returns_when_it_is_another(bench: Bench) -> None:
    bench.bring("one", 1)
    bench.put("two.safetensors", save(toy_expert(2)))
    assert sorted(bench.look()) == ["one", "two"]
    for _ in range(2):
        Store(bench.store.path).undo()
    assert bench.look() == []
    bench.bring("one", 3)
    assert bench.look() == ["one"]


def test_what_is_no_expert_is_told_and_stops_no_other(
    bench: Bench, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.put("README.md", b"experts come here")
    bench.put("bad.safetensors", b"nonsense")
    for name in ("", "empty/"):  # as consoles make folders
        place = f"{server}/{BUCKET}/{bench.folder}/{name}"
        urllib.request.urlopen(urllib.request.Request(place, b"", method="PUT"))
    assert bench.folder.rpartition("/")[2] not in open_storage(bench.url).files()
    bench.bring("good", 1)
    assert bench.look(4) == ["good"]
    told = sorted(capsys.readouterr().err.splitlines())
    assert len(told) == 2 and told[0].startswith("error: README.md: ")
    assert told[1].startswith("error: bad.safetensors: ")


def test_the_command(bench: Bench, mergestream: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.bring("one", 1)
    left = [None] * 3
    monkeypatch.setattr(time, "sleep", lambda seconds: left.pop() if left else (_ for _ in ()).throw(KeyboardInterrupt))
    done = mergestream("watch", bench.store.path, f"{bench.url}/", "--json")
    assert done.code == 0 and done.err == ""
    watching, absorbed = (json.loads(line) for line in done.out.splitlines())
    assert watching["directory"] == bench.url and absorbed["path"] == f"{bench.url}/one"
    for place, code, words in [
        ("s3://no-such-bucket/incoming", 1, "does not exist"),
        ("hf://org/name", 2, "is on the hub"),
    ]:
        refused = mergestream("watch", bench.store.path, place)
        assert refused.code == code and words in refused.err and refused.err.count("\n") == 1
