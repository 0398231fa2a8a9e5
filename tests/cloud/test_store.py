"""Stores in a bucket: the same as on a disk, but for the lock and the files that are written in place."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import obstore
import pytest
import torch

from mergestream import Inputs, LocalEngine, MergestreamError, Store
from mergestream.checkpoints import SafetensorsWriter
from mergestream.checkpoints.checkpoint import item_size
from mergestream.cli.watch import Watcher
from mergestream.errors import StoreBusyError
from mergestream.storage.bucket import BucketStorage
from mergestream.storage.client import RETRIES
from mergestream.store.steps import StepWriter
from mergestream.store.transaction import commit, writing
from tests.cloud.server import BUCKET, SECRET, Trouble, upload
from tests.cloud.test_export import objects, weights
from tests.conftest import RunCommand, Toys, files, save_model, toy_expert
from tests.handmade import handmade_adapter
from tests.hub.conftest import Hub, hub  # noqa: F401

ENGINE = LocalEngine(workers=1)


def address(key: str) -> str:
    return f"s3://{BUCKET}/{key}"


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """Of a store that no other test has."""
    return "stores/" + re.sub(r"\W+", "-", request.node.name)


def grown(place: str | Path, toys: Any, method: str, experts: int = 1) -> Store:
    store = Store.create(place, toys.base, method, engine=ENGINE)
    for expert in toys.experts[:experts]:
        store.add(expert)
    return store


def facts(store: Store) -> list[Any]:
    return [(e.name, e.digest, e.state, e.record, e.kept, e.scale, e.mean_norm) for e in store.history]


def folders(bucket: obstore.store.S3Store, key: str, kind: str) -> set[str]:
    return {name.split("/")[1] for name in objects(bucket, key) if name.startswith(f"{kind}/")}


def interrupted(store: Store, expert: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `add` that is cut short when so many tensors are done."""
    count, record = itertools.count(1), StepWriter.record

    def cut_short(*arguments: Any) -> None:
        record(*arguments)
        if next(count) == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StepWriter, "record", cut_short)
        with pytest.raises(KeyboardInterrupt):
            store.add(expert)


# --- the same as on a disk -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["opcm", "ledger"])
def test_commands_do_the_same_as_on_a_disk(
    method: str,
    toys: Toys,
    bucket: obstore.store.S3Store,
    key: str,
    tmp_path: Path,
    done: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SafetensorsWriter.__init__.__kwdefaults__ or {}, "max_shard_size", 1000)
    places: dict[str, str | Path] = {"near": tmp_path / "near", "far": address(key)}
    told: dict[str, list[Any]] = {}
    for kind, place in places.items():
        done("init", place, "--base", toys.base, "--method", method)
        inspected = json.loads(done("inspect", place, toys.experts[0], "--json"))
        done("add", place, *toys.experts[:3])
        done("undo", place)
        done("verify", place)
        done("report", place, "-o", tmp_path / f"{kind}.html")
        done("export", place, tmp_path / f"{kind}-out")
        told[kind] = [
            {**inspected, "seconds": 0, "predicted": None},
            {**json.loads(done("status", place, "--json")), "ledger": None},  # has its size
            weights(files(tmp_path / f"{kind}-out")),
            done("diff", place, "0", toys.experts[2]),
            facts(Store(place)),
        ]
    assert told["near"] == told["far"]
    content = objects(bucket, key)
    assert len([name for name in content if name.startswith("steps/0002") and name.endswith(".safetensors")]) > 1
    assert not [name for name in content if "plan" in name or "journal" in name]
    for name, data in {**content, **files(tmp_path)}.items():
        assert SECRET.encode() not in data, name


def test_adapters_and_heads_too(toys: Toys, bucket: obstore.store.S3Store, key: str, tmp_path: Path) -> None:
    adapters = [handmade_adapter(tmp_path / f"adapter-{number}", number) for number in (1, 2)]
    found: list[list[Any]] = []
    for place in (tmp_path / "near", address(key)):
        store = Store.create(place, toys.base, "opcm", heads=["embed_tokens*"], engine=ENGINE)
        for adapter in adapters:
            store.add(adapter, allow_other_base=True)
        store.add(toys.experts[0])
        store.verify()
        out = store.export(tmp_path / f"out-{len(found)}", task="expert-1")
        found.append([facts(store), weights(files(out))])
    assert found[0] == found[1]
    assert [name for name in objects(bucket, key) if "/factors-0001." in name]


def test_any_expert_is_removed_and_scores_are_attached(
    toys: Toys, bucket: obstore.store.S3Store, key: str, tmp_path: Path
) -> None:
    found = []
    for place in (tmp_path / "near", address(key)):
        store = grown(place, toys, "ledger", 3)
        store.remove("expert-2")
        store.attach_scores(["a"], [[0.5]])
        found.append([facts(Store(place)), Store(place).scores])
    assert found[0] == found[1]
    assert len(folders(bucket, key, "steps")) == len(folders(bucket, key, "experts")) == 3  # one for undo
    store.keep(0)
    assert len(folders(bucket, key, "steps")) == len(folders(bucket, key, "experts")) == 2


def test_a_store_is_copied_from_a_bucket_to_a_disk(
    toys: Toys, bucket: obstore.store.S3Store, key: str, tmp_path: Path
) -> None:
    grown(address(key), toys, "opcm", 2)
    for name, data in objects(bucket, key).items():
        path = tmp_path / "store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    store = Store(tmp_path / "store", engine=ENGINE)
    store.add(toys.experts[2])
    store.verify()
    assert sorted(path.name for path in (store.path / "steps").iterdir())[1] == "0003"
    assert store.history[-1].state == grown(tmp_path / "other", toys, "opcm", 3).history[-1].state


def test_a_store_is_copied_from_a_disk_to_a_bucket(
    toys: Toys, bucket: obstore.store.S3Store, key: str, tmp_path: Path
) -> None:
    near = grown(tmp_path / "store", toys, "opcm", 2)
    far = Store(upload(bucket, near.path, key), engine=ENGINE)
    for store in (near, far):
        store.add(toys.experts[2])
        store.verify()
    assert facts(near) == facts(far)
    assert folders(bucket, key, "steps") == {"0002", far.history[-1].folder}


def test_a_directory_is_watched_for_it(toys: Toys, key: str, tmp_path: Path) -> None:
    store, found = grown(address(key), toys, "average"), tmp_path / "incoming"
    save_model(found / "another", toy_expert(9))
    save_model(found / "duplicate", toy_expert(1))
    watcher = Watcher(store, found, {})
    watcher.look()
    watcher.look()
    assert [entry.name for entry in Store(address(key)).history] == ["expert-1", "another"]
    store.undo()
    watcher.look()
    store.refresh()
    assert store.manifest.step == 1


def test_weights_are_read_by_range_and_a_step_takes_few_requests(toys: Toys, key: str, troubled: Trouble) -> None:
    store = grown(address(key), toys, "opcm")
    before = len(troubled.requests)
    store.add(toys.experts[1])
    assert len(troubled.requests) - before < 50
    before = len(troubled.requests)
    store.verify()
    asked = [(what, part) for what, part in troubled.requests[before:] if "/model." in what and "GET" in what]
    assert asked and all(part for _, part in asked)


def test_what_is_damaged_is_told_by_its_address(toys: Toys, bucket: obstore.store.S3Store, key: str) -> None:
    store = grown(address(key), toys, "average")
    (name,) = (name for name in objects(bucket, key) if "/model." in name)
    data = objects(bucket, key)[name]
    obstore.put(bucket, f"{key}/{name}", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(MergestreamError, match=rf"^{address(key)}/{name} is damaged: the digest of"):
        store.verify()
    obstore.delete(bucket, f"{key}/steps/{store.history[0].folder}/digests.json")
    with pytest.raises(MergestreamError, match=rf"{address(key)}/steps/.*digests.json cannot be read"):
        store.verify()


# --- what is cut short, and what is left of it ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["opcm", "ledger", "adapter"])
def test_an_interrupted_step_is_begun_again(
    kind: str, toys: Toys, bucket: obstore.store.S3Store, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expert = handmade_adapter(tmp_path / "adapter", 1) if kind == "adapter" else toys.experts[1]
    method = "opcm" if kind == "adapter" else kind
    store = Store.create(address(key), toys.base, method, engine=ENGINE)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    interrupted(store, expert, 2, monkeypatch)
    assert Store(address(key)).manifest.step == 0
    assert [name for name in objects(bucket, key) if name.startswith("steps/")] == [
        f"steps/{folder}/plan.json" for folder in folders(bucket, key, "steps")
    ]
    entry = Store(address(key), engine=ENGINE).add(expert, allow_other_base=True)
    straight = Store.create(tmp_path / "straight", toys.base, method).add(expert, allow_other_base=True)
    assert entry.state == straight.state
    assert folders(bucket, key, "steps") == folders(bucket, key, "experts") == {entry.folder}
    assert not list((tmp_path / "temporary").iterdir())
    store.verify()


@pytest.mark.parametrize("failing", ["model", "digests"])
def test_an_upload_that_fails_leaves_nothing(
    failing: str, toys: Toys, bucket: obstore.store.S3Store, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, put = grown(address(key), toys, "average"), BucketStorage.put
    before = objects(bucket, key)

    def broken(storage: BucketStorage, name: str, path: Path) -> None:
        put(storage, name, path)
        if f"/{failing}" in name:
            raise MergestreamError("the network is gone")

    monkeypatch.setattr(BucketStorage, "put", broken)
    with pytest.raises(MergestreamError, match="the network is gone"):
        store.add(toys.experts[1])
    assert objects(bucket, key) == before


def test_a_disk_that_is_too_small_for_the_step(
    toys: Toys, bucket: obstore.store.S3Store, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = grown(address(key), toys, "average")
    before = objects(bucket, key)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(MergestreamError, match=r"bytes are needed and 1000 are free; .* set TMPDIR to a directory"):
        store.add(toys.experts[1])
    assert objects(bucket, key) == before


def test_leftovers_are_removed_by_the_next_writer_and_by_gc(
    toys: Toys, bucket: obstore.store.S3Store, key: str, done: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = grown(address(key), toys, "average")
    interrupted(store, toys.experts[1], 3, monkeypatch)
    assert len(folders(bucket, key, "steps")) == 2
    entry = store.add(toys.experts[2])
    assert folders(bucket, key, "steps") == {entry.folder, store.history[0].folder}
    interrupted(store, toys.experts[1], 3, monkeypatch)
    before = sum(map(len, objects(bucket, key).values()))
    told = json.loads(done("gc", address(key), "--json"))
    assert told["removed"] == before - sum(map(len, objects(bucket, key).values())) > 0
    assert folders(bucket, key, "steps") == {entry.folder, store.history[0].folder}
    Store(address(key)).verify()


def test_gc_of_a_store_on_a_disk(
    toys: Toys, tmp_path: Path, done: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = grown(tmp_path / "store", toys, "average")
    before = files(store.path)
    interrupted(store, toys.experts[1], 3, monkeypatch)
    assert files(store.path) != before
    assert "deleted" in done("gc", store.path)
    assert files(store.path) == before


def test_an_upload_in_parts_that_fails_leaves_none_of_them(
    toys: Toys,
    server: str,
    bucket: obstore.store.S3Store,
    key: str,
    troubled: Trouble,
    environment: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = grown(address(key), toys, "average")
    before = objects(bucket, key)
    monkeypatch.setattr("mergestream.storage.bucket._PART", 100)  # every file is larger
    monkeypatch.setitem(RETRIES, "max_retries", 0)
    environment(os.environ["AWS_ENDPOINT_URL"])
    troubled.refused = lambda number: "partNumber" in troubled.requests[number - 1][0]
    with pytest.raises(MergestreamError, match=r"steps/.* cannot be written"):
        store.add(toys.experts[1])
    assert [what for what, _ in troubled.requests if "partNumber" in what]
    assert objects(bucket, key) == before
    with urllib.request.urlopen(f"{server}/{BUCKET}?uploads") as answer:
        assert b"<Upload>" not in answer.read()


def test_a_candidate_is_evaluated(toys: Toys, key: str) -> None:
    store = grown(address(key), toys, "average")
    score = store.add(toys.experts[1], evaluate="stat -c %s {model}/model.safetensors").score
    assert score is not None and score > 0


def test_a_step_that_fails_leaves_nothing(toys: Toys, bucket: obstore.store.S3Store, key: str) -> None:
    store = grown(address(key), toys, "average")
    before = objects(bucket, key)
    with pytest.raises(MergestreamError, match="was not added"):
        store.add(toys.experts[1], gates=["norm<=0"])
    assert objects(bucket, key) == before


# --- two writers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["opcm", "ledger"])
def test_of_two_writers_one_wins_and_the_other_may_try_again(
    method: str,
    toys: Toys,
    bucket: obstore.store.S3Store,
    key: str,
    mergestream: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    grown(address(key), toys, method)
    finish = StepWriter.finish

    def meanwhile(*arguments: Any) -> str:
        monkeypatch.setattr(StepWriter, "finish", finish)
        Store(address(key), engine=ENGINE).add(toys.experts[1])
        return finish(*arguments)

    monkeypatch.setattr(StepWriter, "finish", meanwhile)
    result = mergestream("add", address(key), toys.experts[2], "--workers", "1")
    assert result.code == 3, result.err
    assert f"{address(key)} was changed by another process in the meantime" in result.err
    assert [entry.name for entry in Store(address(key)).history] == ["expert-1", "expert-2"]
    assert mergestream("add", address(key), toys.experts[2]).code == 0
    store = Store(address(key))
    store.verify()
    assert facts(store) == facts(grown(tmp_path / "near", toys, method, 3))
    assert len(folders(bucket, key, "experts")) == 3


def test_gc_is_a_writer_too(toys: Toys, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, finish = grown(address(key), toys, "average"), StepWriter.finish

    def meanwhile(*arguments: Any) -> str:
        Store(address(key)).gc()
        return finish(*arguments)

    monkeypatch.setattr(StepWriter, "finish", meanwhile)
    with pytest.raises(StoreBusyError, match="was changed by another process in the meantime"):
        store.add(toys.experts[1])
    Store(address(key)).verify()


def test_a_manifest_of_the_same_content_is_another_one(toys: Toys, key: str) -> None:
    """Who has read it before must not take it for the one that it has read: what it has written may be gone."""
    store = grown(address(key), toys, "average")
    with pytest.raises(StoreBusyError), writing(store):
        other = Store(address(key), engine=ENGINE)
        other.add(toys.experts[1])
        other.undo()
        commit(store, store.manifest)


def test_two_stores_are_not_made_in_one_place(
    toys: Toys, bucket: obstore.store.S3Store, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mergestream.base.model import BaseModel

    examine = BaseModel.examine

    def late(*arguments: Any, **options: Any) -> BaseModel:
        monkeypatch.setattr(BaseModel, "examine", examine)
        Store.create(address(key), toys.base, "average")
        return examine(*arguments, **options)

    monkeypatch.setattr(BaseModel, "examine", late)
    with pytest.raises(MergestreamError, match="is not empty; choose another place"):
        Store.create(address(key), toys.base, "opcm")
    assert Store(address(key)).manifest.method == "average"


# --- services and networks -----------------------------------------------------------------------------------


def test_a_network_that_is_none_of_the_best(toys: Toys, key: str, tmp_path: Path, troubled: Trouble) -> None:
    troubled.refused = lambda number: number % 5 == 0
    troubled.cut = lambda number: number % 7 == 0
    troubled.seconds = 0.002
    store = grown(address(key), toys, "opcm", 2)
    store.undo()
    store.verify()
    assert facts(store) == facts(grown(tmp_path / "near", toys, "opcm", 1))


def test_a_commit_whose_answer_is_lost_is_made_once(toys: Toys, key: str, troubled: Trouble) -> None:
    puts = itertools.count()

    def every_other_time(number: int) -> bool:
        return troubled.requests[number - 1][0] == f"PUT /{BUCKET}/{key}/manifest.json" and next(puts) % 2 == 0

    troubled.lost = every_other_time
    grown(address(key), toys, "average", 2)
    assert next(puts) >= 6
    assert [entry.name for entry in Store(address(key)).history] == ["expert-1", "expert-2"]


def test_a_commit_of_which_nothing_is_heard_leaves_a_whole_store(
    toys: Toys, key: str, troubled: Trouble, environment: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the manifest was replaced is unknown, so what it may name is not removed."""
    grown(address(key), toys, "average")
    monkeypatch.setitem(RETRIES, "max_retries", 1)
    environment(os.environ["AWS_ENDPOINT_URL"])
    troubled.lost = lambda number: troubled.requests[number - 1][0] == f"PUT /{BUCKET}/{key}/manifest.json"
    with pytest.raises(MergestreamError, match="no answer"):
        Store(address(key), engine=ENGINE).add(toys.experts[1])
    store = Store(address(key))
    assert store.manifest.step == 2
    store.verify()


@pytest.mark.parametrize("way", ["not known", "not heeded"])
def test_a_service_without_conditional_puts_is_refused(
    way: str,
    toys: Toys,
    bucket: obstore.store.S3Store,
    key: str,
    troubled: Trouble,
    environment: Callable[[str], None],
    mergestream: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = key + "-made"
    grown(address(made), toys, "average")
    if way == "not known":
        monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
        environment(os.environ["AWS_ENDPOINT_URL"])
    troubled.unconditional = way == "not heeded"
    before = objects(bucket, made)
    for arguments in (("init", address(key), "--base", toys.base), ("add", address(made), toys.experts[1])):
        result = mergestream(*arguments)
        assert result.code == 1
        assert "cannot hold a store: the service has no conditional put" in result.err
    assert not objects(bucket, key + "/")
    assert objects(bucket, made) == before
    Store(address(made)).verify()


def test_what_no_store_can_be(toys: Toys, bucket: obstore.store.S3Store, key: str, mergestream: RunCommand) -> None:
    obstore.put(bucket, f"{key}/thesis.txt", b"years of work")
    for arguments, words in {
        ("init", address(key), "--base", toys.base): "is not empty; choose another place for the store",
        ("status", address("nothing")): "is not a mergestream store; make one with: mergestream init s3://",
        ("status", "hf://org/name"): "mergestream pull hf://org/name STORE downloads it",
        ("init", "hf://org/name", "--base", toys.base): "is on the hub",
    }.items():
        result = mergestream(*arguments)
        assert result.code in (1, 2)
        assert words in result.err


def test_what_cannot_be_done_with_a_store_says_so(toys: Toys, key: str, mergestream: RunCommand) -> None:
    grown(address(key), toys, "average")
    for arguments, words in {
        ("add", address(key), toys.experts[1], "--log", "jsonl"): "is in object storage",
        ("watch", address(key), address(key) + "/incoming"): "contain one another",
        ("export", address(key), address(key) + "/out"): "which the merge is made of",
    }.items():
        result = mergestream(*arguments)
        assert result.code in (1, 2)
        assert words in result.err


def test_it_is_pushed_to_the_hub_and_pulled(
    toys: Toys,
    key: str,
    tmp_path: Path,
    hub: Any,  # noqa: F811
    done: Callable[..., str],
) -> None:
    store = grown(address(key), toys, "opcm", 2)
    store.attach_scores(["a", "b"], [[0.5, 0.5]])
    done("push", address(key), "hf://org/store", "--private")
    done("pull", "hf://org/store", tmp_path / "pulled")
    pulled = Store(tmp_path / "pulled")
    pulled.verify()
    assert facts(pulled) == facts(store) and pulled.scores == store.scores


def test_what_is_read_of_the_state_counts_as_memory(toys: Toys, key: str, tmp_path: Path) -> None:
    """A view of a file takes none, and what is fetched does."""
    near, far = (grown(place, toys, "average") for place in (tmp_path / "near", address(key)))
    tensors, readings = near.manifest.base.tensors, []
    for store in (near, far):
        with store.snapshot() as snapshot:
            readings.append(snapshot.reading(ENGINE).memory)
    for name in near.manifest.base.merged:
        state = tensors[name].numel * item_size(tensors[name].state_dtype)
        assert readings[1][name] - readings[0][name] == state
    assert far.inspect(toys.experts[1]).memory > near.inspect(toys.experts[1]).memory


def test_inputs_of_experts(key: str, tmp_path: Path, bucket: obstore.store.S3Store, hub: Hub) -> None:  # noqa: F811
    """They are written, kept and dropped as on a disk; a writer that lost leaves nothing, and push takes them."""
    torch.manual_seed(0)
    first = torch.nn.Linear(16, 16)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Linear(16, 16))
    for name in ("base", "one", "two"):
        save_model(tmp_path / name, model.state_dict())
        torch.nn.init.normal_(first.weight)
    given = Inputs([torch.randn(5, 16) for _ in range(20)], model=model)
    there, here = (Store.create(at, tmp_path / "base", engine=ENGINE) for at in (address(key), tmp_path / "store"))
    for store in (there, here):
        store.add(tmp_path / "one", inputs=given)
        store.add(tmp_path / "two")
        store.calibrate("two", given)
        store.verify()
    assert [entry.inputs and entry.inputs.record for entry in there.history] == [
        entry.inputs and entry.inputs.record for entry in here.history
    ]
    assert len(folders(bucket, key, "inputs")) == 2
    loser = Store(address(key), engine=ENGINE)

    def overtaken(model: Any, item: Any) -> Any:
        there.keep(there.manifest.keep + 1)
        return model(item)

    with pytest.raises(StoreBusyError):
        loser.calibrate("one", Inputs(given.source, model=model, call=overtaken))
    there.refresh()
    there.gc()
    assert len(folders(bucket, key, "inputs")) == 2
    there.push("hf://org/model", private=True)
    pulled = Store.pull("hf://org/model", tmp_path / "pulled")
    assert [entry.inputs for entry in pulled.history] == [entry.inputs for entry in there.history]
    assert there.undo().name == "two" and there.manifest.step == 2
    there.undo()
    assert len(folders(bucket, key, "inputs")) == 1
    there.remove("one")
    there.keep(0)
    assert folders(bucket, key, "inputs") == set()
