"""Exports to object storage: a folder of objects that is whole by its marker, or says that it is not."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import obstore
import pytest

from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError, StoreBusyError
from mergestream.export.directory import Output
from mergestream.storage.bucket import BucketStorage
from mergestream.storage.client import RETRIES
from tests.cloud.server import BUCKET, SECRET, Trouble
from tests.conftest import RunCommand, Toys, files, toy_base
from tests.handmade import handmade_adapter

MARKER = "mergestream.json"


@pytest.fixture(scope="module")
def store(toys: Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mergestream.cli import main

    place = tmp_path_factory.mktemp("stores") / "store"
    assert main(["init", str(place), "--base", str(toys.base), "--method", "opcm"]) == 0
    assert main(["add", str(place), *map(str, toys.experts[:2])]) == 0
    return place


def objects(bucket: obstore.store.S3Store, key: str) -> dict[str, bytes]:
    found = obstore.list(bucket, key).collect()
    return {entry["path"].removeprefix(f"{key}/"): bytes(obstore.get(bucket, entry["path"]).bytes()) for entry in found}


def weights(content: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in content.items() if name.endswith((".safetensors", ".index.json"))}


def drafted(output: Output, content: str = "new") -> None:
    with output.draft() as draft:
        (draft / "folder").mkdir()
        (draft / "folder" / "file.txt").write_text(content)
        (draft / "mergestream.json").write_text('{"mergestream": "", "command": null}')


def test_the_same_files_as_on_a_disk(
    store: Path, bucket: obstore.store.S3Store, tmp_path: Path, done: Callable[..., str]
) -> None:
    done("export", store, tmp_path / "out", "--max-shard-size", "2kB")
    done("export", store, f"s3://{BUCKET}/exports/out", "--max-shard-size", "2kB")
    near, far = files(tmp_path / "out"), objects(bucket, "exports/out")
    assert near.keys() == far.keys()
    assert weights(near) == weights(far)
    assert "unfinished" not in json.loads(far[MARKER])
    with open_checkpoint(f"s3://{BUCKET}/exports/out") as checkpoint:
        assert checkpoint.tensors.keys() == toy_base().keys()


def test_merges_and_adapters_too(
    toys: Toys, bucket: obstore.store.S3Store, tmp_path: Path, done: Callable[..., str]
) -> None:
    done("init", tmp_path / "store", "--base", toys.base, "--method", "average")
    done("add", tmp_path / "store", handmade_adapter(tmp_path / "adapter", 1), "--allow-other-base")
    for start in (f"{tmp_path}", f"s3://{BUCKET}"):
        done("merge", "--base", toys.base, *toys.experts[:2], "-o", f"{start}/merged", "--method", "ties")
        done("export", tmp_path / "store", f"{start}/lora", "--format", "lora")
    for name in ("merged", "lora"):
        assert weights(files(tmp_path / name)) == weights(objects(bucket, name)) != {}


def test_what_is_replaced_leaves_nothing_behind(
    store: Path, bucket: obstore.store.S3Store, done: Callable[..., str], mergestream: RunCommand
) -> None:
    place = f"s3://{BUCKET}/replaced"
    done("export", store, place, "--max-shard-size", "2kB")
    before = objects(bucket, "replaced")
    result = mergestream("export", store, place)
    assert result.code == 1
    assert f"{place} exists already; pass --overwrite" in result.err
    assert objects(bucket, "replaced") == before
    done("export", store, place, "--overwrite")
    assert weights(objects(bucket, "replaced")).keys() == {"model.safetensors"}


def test_nothing_that_is_no_export_is_replaced(
    store: Path, bucket: obstore.store.S3Store, mergestream: RunCommand
) -> None:
    obstore.put(bucket, "mine/thesis.txt", b"years of work")
    obstore.put(bucket, "stored/mergestream.json", b'{"mergestream": "0", "command": null}')
    obstore.put(bucket, "stored/below/manifest.json", b'{"format": 3}')
    for place, words in {
        "mine": "is not empty, and no export of mergestream",
        "base": "is not empty, and no export of mergestream",
        "stored": "holds the store",
    }.items():
        before = objects(bucket, place)
        result = mergestream("export", store, f"s3://{BUCKET}/{place}", "--overwrite")
        assert result.code == 1
        assert words in result.err
        assert objects(bucket, place) == before


def test_nothing_goes_where_the_models_are(toys: Toys, mergestream: RunCommand) -> None:
    for place in ("base/out", "expert-1/deeper/out"):
        arguments = (
            "merge",
            "--base",
            f"s3://{BUCKET}/base",
            f"s3://{BUCKET}/expert-1",
            "-o",
            f"s3://{BUCKET}/{place}",
        )
        result = mergestream(*arguments)
        assert result.code == 1
        assert "which the merge is made of" in result.err


def test_the_hub_is_pushed_to(store: Path, mergestream: RunCommand) -> None:
    result = mergestream("export", store, "hf://org/name")
    assert result.code == 2
    assert "add --push org/name" in result.err


def test_a_network_that_is_none_of_the_best(
    store: Path, bucket: obstore.store.S3Store, tmp_path: Path, done: Callable[..., str], troubled: Trouble
) -> None:
    done("export", store, tmp_path / "out")
    troubled.refused = lambda number: number % 3 == 0
    done("export", store, f"s3://{BUCKET}/troubled")
    assert weights(objects(bucket, "troubled")) == weights(files(tmp_path / "out"))


def test_an_answer_that_is_lost_is_no_other_export(bucket: obstore.store.S3Store, troubled: Trouble) -> None:
    """The marker has been put, and nobody told: it is found to be our own."""
    puts = itertools.count()

    def every_other_time(number: int) -> bool:
        return troubled.requests[number - 1][0] == f"PUT /{BUCKET}/lost/{MARKER}" and next(puts) % 2 == 0

    troubled.lost = every_other_time
    drafted(Output(Path(f"s3://{BUCKET}/lost")))
    assert objects(bucket, "lost").keys() == {MARKER, "folder/file.txt"}


def test_what_fails_leaves_nothing_that_is_new(
    bucket: obstore.store.S3Store,
    troubled: Trouble,
    environment: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RETRIES, "max_retries", 1)
    environment(os.environ["AWS_ENDPOINT_URL"])
    troubled.refused = lambda number: troubled.requests[number - 1][0] == f"PUT /{BUCKET}/failed/folder/file.txt"
    with pytest.raises(MergestreamError, match=f"s3://{BUCKET}/failed/folder/file.txt cannot be written: ") as error:
        drafted(Output(Path(f"s3://{BUCKET}/failed")))
    assert SECRET not in str(error.value)
    assert not objects(bucket, "failed")


def test_one_that_is_cut_short_says_so_and_can_be_replaced(
    bucket: obstore.store.S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(f"s3://{BUCKET}/cut-short")
    with monkeypatch.context() as patch:
        patch.setattr(BucketStorage, "put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(BucketStorage, "delete", lambda *_: None)  # as a kill
        with pytest.raises(KeyboardInterrupt):
            drafted(Output(place))
    with pytest.raises(MergestreamError, match="is being written by an export, or by one that was interrupted"):
        open_checkpoint(place)
    drafted(Output(place, overwrite=True))
    assert "unfinished" not in json.loads(objects(bucket, "cut-short")[MARKER])


def test_of_two_exports_one_comes_to_its_end(bucket: obstore.store.S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    place, upload = Path(f"s3://{BUCKET}/contested"), BucketStorage.put

    def late(folder: BucketStorage, name: str, file: Path) -> None:
        monkeypatch.setattr(BucketStorage, "put", upload)
        drafted(Output(place, overwrite=True), "by the other")

    monkeypatch.setattr(BucketStorage, "put", late)
    with pytest.raises(StoreBusyError, match="is being written by another export"):
        drafted(Output(place))
    assert objects(bucket, "contested")["folder/file.txt"] == b"by the other"
    assert "unfinished" not in json.loads(objects(bucket, "contested")[MARKER])
