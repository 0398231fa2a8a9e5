"""Models in object storage: read where they are, by range, as if they were on a disk."""

from __future__ import annotations

import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
import torch
from safetensors.torch import save_file

from mergestream.checkpoints import open_checkpoint
from mergestream.cli.watch import is_temporary
from mergestream.errors import MergestreamError, UsageError
from mergestream.storage import Url, parse_url
from tests.cloud.server import BUCKET, SECRET, Trouble, upload
from tests.conftest import Toys, save_model, toy_base

BASE = f"s3://{BUCKET}/base"


def assert_same(source: str | Path, tensors: dict[str, torch.Tensor]) -> None:
    with open_checkpoint(source) as checkpoint:
        assert checkpoint.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            found = checkpoint.read(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor), name


# --- addresses -----------------------------------------------------------------------------------------------


def test_an_address_is_known_however_it_is_written() -> None:
    for written in ("s3://bucket/a/b", "S3://bucket/a/b/", Path("s3://bucket/a/b")):
        assert parse_url(written) == Url("s3", "bucket", "a/b")
    assert str(parse_url("az://container")) == "az://container"
    for elsewhere in ("a/b", "/a/b", "org/name@main", "c:/a", Path("a")):
        assert parse_url(elsewhere) is None


@pytest.mark.parametrize(
    "address",
    [
        f"s3://key:{SECRET}@bucket/a",
        f"s3://key:{SECRET[:4]}/{SECRET[4:]}@bucket/a",
        f"az://container/a?sig={SECRET}",
        f"hf://{SECRET}@org/name",
        f"gs://bucket/a?token={SECRET}",
    ],
)
def test_an_address_with_credentials_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(UsageError, match="refused") as refused:
        open_checkpoint(address)
    assert SECRET not in str(refused.value)
    assert SECRET[4:] not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["s3://", "s3://bucket/../a", "s3://bucket/a//b", "s3://bucket/a\nb", "abfss://c/a", "https://host/a"]
)
def test_no_address_is_said_to_be_none(address: str) -> None:
    with pytest.raises(UsageError, match="object storage") as refused:
        open_checkpoint(address)
    assert "\n" not in str(refused.value)


def test_without_credentials_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, troubled: Trouble) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(MergestreamError, match="no credentials in the environment: set AWS_ACCESS_KEY_ID and AWS_SEC"):
        open_checkpoint(BASE)
    assert not troubled.requests


def test_without_the_library_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("obstore", "obstore.store"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MergestreamError, match=r"pip install 'mergestream\[cloud\]'"):
        open_checkpoint(BASE)


# --- reading -------------------------------------------------------------------------------------------------


def test_a_model_is_read_as_from_a_disk(bucket: obstore.store.S3Store) -> None:
    assert_same(BASE, toy_base())
    assert_same(f"{BASE}/model.safetensors", toy_base())
    with open_checkpoint(BASE) as checkpoint:
        assert checkpoint.source == BASE
        assert checkpoint.copies == 1


def test_a_model_travels_as_an_address(bucket: obstore.store.S3Store) -> None:
    """To the nodes of a cluster, where it is opened again."""
    with open_checkpoint(BASE) as here, pickle.loads(pickle.dumps(here)) as there:
        assert there.tensors == here.tensors
        assert all(torch.equal(there.read(name), here.read(name)) for name in here.tensors)


def test_shards_and_what_goes_with_a_model(bucket: obstore.store.S3Store, tmp_path: Path) -> None:
    tensors = toy_base()
    names = list(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    (tmp_path / "modules.json").write_text('[{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]')
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "config.json").write_text("{}")
    url = upload(bucket, tmp_path, "deep/er/sharded")
    assert_same(url, tensors)
    with open_checkpoint(url) as checkpoint:
        assert checkpoint.directory is not None
        along = {str(path.relative_to(checkpoint.directory)) for path in checkpoint.companions()}
    assert along == {"config.json", "modules.json", "1_Pooling/config.json"}
    obstore.delete(bucket, "deep/er/sharded/b.safetensors")
    with pytest.raises(MergestreamError, match=f"{url}/b.safetensors is missing, but"):
        open_checkpoint(url)


def test_only_what_is_needed_is_fetched(bucket: obstore.store.S3Store, tmp_path: Path, troubled: Trouble) -> None:
    large = {"small.weight": torch.randn(8, 8), "large.weight": torch.randn(2048, 1300)}
    url = upload(bucket, save_model(tmp_path, large), "large")
    with open_checkpoint(url) as checkpoint:
        assert checkpoint.read("small.weight").equal(large["small.weight"])
        opened = len(troubled.requests)
        assert troubled.received < 200_000, "a listing, a header and a small tensor"
        assert checkpoint.read("large.weight").equal(large["large.weight"])
    ranges = [asked for _, asked in troubled.requests[opened:]]
    assert len(ranges) == 3, "in ranges of 4 MiB"


def test_small_tensors_that_lie_side_by_side_are_fetched_together(
    bucket: obstore.store.S3Store, tmp_path: Path, troubled: Trouble
) -> None:
    many = {f"{n:02}.weight": torch.randn(200, 100) for n in range(60)} | {"30.weight": torch.randn(1024, 300)}
    url = upload(bucket, save_model(tmp_path, many), "together")
    with open_checkpoint(url) as checkpoint:
        opened = len(troubled.requests)
        with ThreadPoolExecutor(8) as workers:
            assert all(workers.map(lambda name: checkpoint.read(name).equal(many[name]), many))
    ranges = [asked for _, asked in troubled.requests[opened:]]
    assert len(ranges) == 3, "the large one, and those before and after it"


def test_a_long_header_takes_two_requests(bucket: obstore.store.S3Store, tmp_path: Path, troubled: Trouble) -> None:
    many = {f"layers.{n}.weight": torch.full((2,), float(n)) for n in range(2000)}
    url = upload(bucket, save_model(tmp_path, many), "many")
    with open_checkpoint(url) as checkpoint:
        assert len([path for path, _ in troubled.requests if "model.safetensors" in path]) == 2
        assert checkpoint.read("layers.1999.weight").tolist() == [1999, 1999]


def test_the_fingerprint_is_that_of_the_objects(bucket: obstore.store.S3Store, tmp_path: Path) -> None:
    url = upload(bucket, save_model(tmp_path, toy_base()), "printed")
    first, again = open_checkpoint(url).fingerprint, open_checkpoint(url).fingerprint
    assert first == again
    upload(bucket, save_model(tmp_path, {**toy_base(), "temperature": torch.tensor(3.0)}), "printed")
    assert open_checkpoint(url).fingerprint != first


# --- what is not there, and what is no model -----------------------------------------------------------------


def test_what_is_not_there_is_named(bucket: obstore.store.S3Store) -> None:
    for url, words in {
        f"s3://{BUCKET}/nothing": "holds neither a model",
        f"s3://{BUCKET}/base/other.safetensors": "does not exist",
        "s3://no-such-bucket/base": "does not exist",
    }.items():
        with pytest.raises(MergestreamError, match=words) as error:
            open_checkpoint(url)
        assert url in str(error.value)


def test_damaged_and_foreign_objects_are_named(bucket: obstore.store.S3Store, toys: Toys) -> None:
    whole = (toys.base / "model.safetensors").read_bytes()
    obstore.put(bucket, "cut/model.safetensors", whole[:-10])
    obstore.put(bucket, "tiny/model.safetensors", b"abc")
    obstore.put(bucket, "none/model.safetensors", b"")
    obstore.put(bucket, "torch/pytorch_model.bin", b"abc")
    for name, words in {
        "cut": "cut/model.safetensors is truncated: 10 bytes",
        "tiny": "has only 3 bytes",
        "none": "has only 0 bytes",
        "torch": "only .safetensors is",
    }.items():
        with pytest.raises(MergestreamError, match=words):
            open_checkpoint(f"s3://{BUCKET}/{name}")


def test_an_object_that_changes_is_not_read_on(bucket: obstore.store.S3Store, tmp_path: Path) -> None:
    model = {"large.weight": torch.zeros(1024, 300), "small.weight": torch.zeros(3)}
    url = upload(bucket, save_model(tmp_path, model), "changing")
    with open_checkpoint(url) as checkpoint:
        checkpoint.read("large.weight")
        upload(bucket, save_model(tmp_path, {**model, "small.weight": torch.ones(3)}), "changing")
        for name in model:
            with pytest.raises(MergestreamError, match=r"changing/model.safetensors has changed since it was opened"):
                checkpoint.read(name)


# --- a network that is none of the best ----------------------------------------------------------------------


def test_requests_that_fail_are_made_again(troubled: Trouble) -> None:
    troubled.refused = lambda number: number % 3 == 0
    assert_same(BASE, toy_base())


def test_answers_that_break_off_are_asked_for_again(troubled: Trouble) -> None:
    troubled.cut = lambda number: number % 2 == 0
    assert_same(BASE, toy_base())


def test_a_slow_server_is_waited_for(troubled: Trouble) -> None:
    troubled.seconds = 0.02
    assert_same(BASE, toy_base())


def test_a_server_that_is_gone_is_told_in_a_sentence(troubled: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    troubled.cut = lambda number: True
    with pytest.raises(MergestreamError, match=r"cannot be read: no answer, or one") as error:
        open_checkpoint(BASE)
    assert is_temporary(error.value), "so that watch tries it again"
    assert SECRET not in str(error.value)
    assert "127.0.0.1" not in str(error.value)


def test_a_server_that_sends_more_than_the_range_is_refused(troubled: Trouble) -> None:
    with open_checkpoint(BASE) as checkpoint:
        troubled.whole = True
        with pytest.raises(MergestreamError, match=r"model\.safetensors cannot be read"):
            checkpoint.read("layers.0.q.weight")
