"""What is read of a bucket and kept on a disk: never stale, never damaged, never more than it may be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch

from mergestream import cache_objects
from mergestream.checkpoints import open_checkpoint
from mergestream.engine.packing import pack, unpack
from mergestream.storage.cache import Cache, cache_in_use
from tests.cloud.server import BUCKET, Trouble, upload
from tests.conftest import RunCommand, Toys, files, save_model, toy_base, toy_expert

BASE = f"s3://{BUCKET}/base"
EXPERTS = [f"s3://{BUCKET}/expert-{number}" for number in (1, 2)]


@pytest.fixture(autouse=True)
def no_cache_afterwards() -> Iterator[None]:
    yield
    cache_objects(None)


def all_of(url: str) -> dict[str, torch.Tensor]:
    with open_checkpoint(url) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def ranges(troubled: Any) -> int:
    return sum(bool(asked) for _, asked in troubled.requests)


def test_what_is_kept_is_not_fetched_again(
    toys: Toys, tmp_path: Path, done: Callable[..., str], troubled: Trouble
) -> None:
    cache = ("--cache", tmp_path / "cache")
    done("merge", "--base", toys.base, *toys.experts[:2], "-o", tmp_path / "near")
    done("merge", "--base", BASE, *EXPERTS, "-o", tmp_path / "far", *cache)
    assert ranges(troubled) > 0
    troubled.requests.clear()
    done("merge", "--base", BASE, *EXPERTS, "-o", tmp_path / "again", *cache)
    assert ranges(troubled) == 0 and troubled.requests, "there are only listings"
    near, far, again = (files(tmp_path / name, ".safetensors") for name in ("near", "far", "again"))
    assert near == far == again
    done("merge", "--base", BASE, *EXPERTS, "-o", tmp_path / "without")
    assert ranges(troubled) > 0, "without the option nothing is kept"


def test_what_is_damaged_is_fetched_again(tmp_path: Path, troubled: Trouble) -> None:
    cache_objects(tmp_path / "cache")
    for url in (BASE, *EXPERTS):
        all_of(url)
    kept = sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    content = bytearray(kept[3].read_bytes())
    content[-1] ^= 1
    kept[3].write_bytes(content)
    min(kept).write_bytes(b"")
    kept[1].write_bytes(kept[2].read_bytes())
    for expected in (3, 0):
        troubled.requests.clear()
        for seed, url in enumerate((BASE, *EXPERTS)):
            assert same(all_of(url), toy_expert(seed) if seed else toy_base())
        assert ranges(troubled) == expected


def test_what_is_stale_is_not_used(bucket: obstore.store.S3Store, tmp_path: Path) -> None:
    cache_objects(tmp_path / "cache")
    url = upload(bucket, save_model(tmp_path / "model", toy_base()), "cached")
    assert same(all_of(url), toy_base())
    other = {**toy_base(), "temperature": torch.tensor(3.0)}  # all of the same size
    upload(bucket, save_model(tmp_path / "model", other), "cached")
    assert same(all_of(url), other)


def sizes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    (tmp_path / "00").mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "00" / "mine.txt").write_text("mine")
    os.utime(tmp_path / "00" / "mine.txt", (0, 0))
    cache = Cache(tmp_path, 1000)
    fetched: list[str] = []

    def read(key: str, size: int = 100) -> bytes:
        def fetch() -> bytes:
            fetched.append(key)
            return key.encode() * size

        return cache.read(key, fetch)

    for age, key in enumerate("abcdefgh"):
        read(key)
        (newest,) = (path for path in tmp_path.glob("??/*") if path.stat().st_mtime > 1e9 and path.suffix != ".txt")
        os.utime(newest, (age, age))
    read("a"), read("c")
    fetched.clear()
    read("x", 400)
    assert sizes(tmp_path) <= 1000 + len("mine" * 2)
    assert [read(key)[:1] for key in "acx"] == [b"a", b"c", b"x"] and fetched == ["x"]
    read("b")
    assert fetched == ["x", "b"]
    assert read("y", 2000) == b"y" * 2000 and sizes(tmp_path) <= 1000 + 8, "what is larger than all is not kept"
    assert (tmp_path / "mine.txt").is_file() and (tmp_path / "00" / "mine.txt").is_file()


def test_many_may_share_a_directory(tmp_path: Path) -> None:
    caches = [Cache(tmp_path, 20_000) for _ in range(4)]

    def read(number: int) -> bool:
        key = str(number % 50)
        return caches[number % 4].read(key, lambda: key.encode() * 500) == key.encode() * 500

    (tmp_path / "00").mkdir()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(600)))
    assert sizes(tmp_path) <= 20_000 + 4 * 1016
    assert not [path for path in tmp_path.glob("??/*") if path.suffix], "no draft is left"


def test_a_disk_without_room_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_objects(tmp_path)
    monkeypatch.setattr(Cache, "_add", lambda *_: (_ for _ in ()).throw(OSError("full")))
    assert same(all_of(BASE), toy_base())


def test_workers_elsewhere_have_one_too(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    cache_objects(tmp_path / "cache", "1GB")
    packed, _ = pack(str.upper)
    cache_objects(None)
    unpack(packed)
    assert cache_in_use() == (tmp_path / "cache", 10**9)
    cache_objects(None)
    nowhere, _ = pack(str.upper)
    unpack(packed)
    unpack(nowhere)
    assert cache_in_use()[0] is None


def test_no_place_for_a_cache_is_told(toys: Toys, tmp_path: Path, mergestream: RunCommand) -> None:
    (tmp_path / "file").touch()
    for place, words in {
        tmp_path / "file": "cannot be used as a cache: ",
        BASE: "the cache must be a local directory",
    }.items():
        done = mergestream("init", tmp_path / "store", "--base", toys.base, "--cache", place)
        assert done.code == 2 and words in done.err and done.err.count("\n") == 1
