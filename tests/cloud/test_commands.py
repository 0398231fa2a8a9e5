"""Commands whose base and experts are in object storage: the same bytes as from a disk, and no secret anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import obstore
import pytest

from mergestream.checkpoints import location
from tests.cloud.server import BUCKET, SECRET, Trouble, upload
from tests.conftest import RunCommand, Toys, files, save_model, toy_base
from tests.handmade import handmade_adapter

BASE = f"s3://{BUCKET}/base"
EXPERTS = [f"s3://{BUCKET}/expert-{number}" for number in (1, 2)]


@pytest.mark.parametrize("method", ["opcm", "ledger", "ties"])
def test_a_store_of_models_in_a_bucket_is_that_of_the_same_on_a_disk(
    method: str, toys: Toys, tmp_path: Path, done: Callable[..., str]
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for store, base, experts in ((near, toys.base, toys.experts[:2]), (far, BASE, EXPERTS)):
        done("init", store, "--base", base, "--method", method)
        done("inspect", store, experts[0])
        done("add", store, *experts)
        done("export", store, tmp_path / f"{store.name}-out")
        done("verify", store)
    assert files(near / "steps") == files(far / "steps")
    ours, theirs = (files(tmp_path / f"{name}-out", ".safetensors") for name in ("near", "far"))
    assert ours == theirs
    manifest = json.loads((far / "manifest.json").read_text())
    assert [manifest["base"]["source"], *(entry["source"] for entry in manifest["history"])] == [BASE, *EXPERTS]
    assert [entry["name"] for entry in manifest["history"]] == ["expert-1", "expert-2"]
    assert EXPERTS[0] in (tmp_path / "far-out" / "README.md").read_text()


def test_merge_from_a_bucket_that_fails_now_and_then(
    toys: Toys, tmp_path: Path, done: Callable[..., str], troubled: Trouble
) -> None:
    done("merge", "--base", toys.base, *toys.experts[:2], "-o", tmp_path / "near", "--method", "ties")
    troubled.refused = lambda number: number % 5 == 0
    troubled.cut = lambda number: number % 7 == 0
    done("merge", "--base", BASE, *EXPERTS, "-o", tmp_path / "far", "--method", "ties")
    assert files(tmp_path / "near", ".safetensors") == files(tmp_path / "far", ".safetensors")
    assert troubled.requests


def test_a_store_goes_from_a_disk_to_a_bucket_and_back(toys: Toys, tmp_path: Path, done: Callable[..., str]) -> None:
    store = tmp_path / "store"
    done("init", store, "--base", toys.base)
    done("add", store, EXPERTS[0], "--base", BASE)
    assert BASE in done("status", store)
    done("add", store, toys.experts[1], "--base", toys.base)
    done("verify", store)


def test_a_base_that_was_overwritten_is_found_out(
    bucket: obstore.store.S3Store, tmp_path: Path, done: Callable[..., str], mergestream: RunCommand
) -> None:
    store, url = tmp_path / "store", upload(bucket, save_model(tmp_path / "base", toy_base()), "base-to-be")
    done("init", store, "--base", url)
    changed = toy_base()
    changed["layers.0.q.weight"][0, 0] += 1
    upload(bucket, save_model(tmp_path / "base", changed), "base-to-be")
    result = mergestream("add", store, EXPERTS[0])
    assert result.code == 1
    assert f"the base has changed since the store was made: tensor layers.0.q.weight in {url}" in result.err


def test_an_adapter_in_a_bucket(
    bucket: obstore.store.S3Store, toys: Toys, tmp_path: Path, done: Callable[..., str]
) -> None:
    adapter = handmade_adapter(tmp_path / "adapter", 1)
    url = upload(bucket, adapter, "adapter")
    stores = [tmp_path / name for name in ("near", "directory", "file")]
    for store, expert in zip(stores, (adapter, url, f"{url}/adapter_model.safetensors"), strict=True):
        done("init", store, "--base", BASE)
        done("add", store, expert, "--allow-other-base")
    near, *far = (files(store / "steps") for store in stores)
    assert far == [near, near]


def test_no_secret_is_told(tmp_path: Path, mergestream: RunCommand, troubled: Trouble) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    told = [
        mergestream("init", store, "--base", BASE),
        mergestream("add", store, EXPERTS[0], "-v"),
        mergestream("export", store, out),
        mergestream("add", store, f"s3://key:{SECRET}@{BUCKET}/expert-2"),
        mergestream("init", f"s3://key:{SECRET}@{BUCKET}/store", "--base", BASE),
        mergestream("export", store, f"s3://{BUCKET}/out?token={SECRET}"),
    ]
    troubled.refused = lambda number: True
    told.append(mergestream("add", store, EXPERTS[1]))
    assert [result.code for result in told[-4:]] == [2, 2, 2, 1], told
    assert all(SECRET not in result.out + result.err for result in told)
    written = {**files(store), **files(out)}
    assert written
    assert not any(SECRET.encode() in content for content in written.values())


def test_nothing_of_the_weights_is_left_on_this_machine(
    tmp_path: Path, done: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    location._download.cache_clear()
    done("merge", "--base", BASE, EXPERTS[0], "-o", tmp_path / "out")
    assert list(scratch.iterdir())  # it was used
    assert not [path for path in scratch.rglob("*") if path.suffix == ".safetensors"]
