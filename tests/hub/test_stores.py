"""A store goes to the hub and comes back as it was, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mergestream import OPCM, Store
from mergestream.errors import MergestreamError, MergestreamWarning, UsageError
from tests.conftest import RunCommand, Toys, files
from tests.hub.conftest import Hub
from tests.workshop import Workshop, llama, workshop  # noqa: F401


def parts(store: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(store).items() if name != "lock"}


@pytest.fixture
def store(tmp_path: Path, toys: Toys) -> Store:
    store = Store.create(tmp_path / "store", toys.base, keep=2)
    for expert in toys.experts[:3]:
        store.add(expert)
    return store


def test_there_and_back(tmp_path: Path, store: Store, hub: Hub, done: Callable[..., str], toys: Toys) -> None:
    store.attach_scores(["one", "two", "three"], [[0.5] * 3] * 3)
    store.undo()
    assert "pushed to http://127.0.0.1" in done("push", store.path, "hf://org/store", "--private")
    assert hub.private == {"org/store"}
    assert b"mergestream pull hf://org/store store" in hub.files("org/store")["README.md"]
    assert "pulled: step 2, all digests match" in done("pull", "hf://org/store", tmp_path / "pulled")
    assert parts(tmp_path / "pulled") == parts(store.path)
    pulled = Store(tmp_path / "pulled")
    pulled.verify()
    pulled.add(toys.experts[3])
    store.add(toys.experts[3])
    assert pulled.history[-1].state == store.history[-1].state
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pulled", "store"], "nothing is left beside them"


def test_what_is_pushed_again_replaces_what_was_there(tmp_path: Path, store: Store, hub: Hub) -> None:
    store.push("org/store")
    received = len(hub.received)
    store.remove("expert-1")
    store.push("hf://org/store")
    assert len(hub.received) == received, "the rest was there already"
    Store.pull("org/store", tmp_path / "pulled")
    pulled = Store(tmp_path / "pulled")
    pulled.verify(base=False)
    assert store.undo().name == "expert-1" and pulled.undo().name != "expert-1", "removed experts are not pushed"
    store.remove("expert-1")
    store.keep(0)
    Store.pull("org/store", tmp_path / "again").keep(0)
    kept = [
        {name: data for name, data in parts(path).items() if "manifest" not in name}
        for path in (tmp_path / "again", store.path)
    ]
    assert kept[0] == kept[1]


def test_factors_and_a_store_that_is_empty(tmp_path: Path, workshop: Workshop, hub: Hub) -> None:  # noqa: F811
    base = workshop.base(llama)
    store = Store.create(tmp_path / "store", base, OPCM(), keep=1)
    store.push("org/empty")
    assert Store.pull("org/empty", tmp_path / "empty").manifest == store.manifest
    for seed in (1, 2):
        store.add(workshop.adapter(base, f"a{seed}", seed, r=2, target_modules=["q_proj"]))
    store.push("org/store")
    Store.pull("org/store", tmp_path / "pulled").undo()
    store.undo()
    assert Store(tmp_path / "pulled").history == store.history


def test_what_comes_meanwhile_is_not_in_it(tmp_path: Path, store: Store, hub: Hub, toys: Toys) -> None:
    def meanwhile(path: str) -> bool:
        if "/preupload/" in path and store.manifest.step == 3:
            other = Store(store.path)
            other.keep(0)
            other.add(toys.experts[3])
            store.refresh()
        return False

    before, hub.refuse = parts(store.path), meanwhile
    store.push("org/store")
    assert store.manifest.step == 4
    Store.pull("org/store", tmp_path / "pulled").verify()
    assert parts(tmp_path / "pulled") == before


def test_a_damaged_store_does_not_take_its_place(
    tmp_path: Path, store: Store, hub: Hub, mergestream: RunCommand
) -> None:
    store.push("org/store")
    pushed = hub.files("org/store")
    name = next(name for name in pushed if name.startswith("steps/") and name.endswith(".safetensors"))
    good, pushed[name] = pushed[name], pushed[name][:-1] + b"\x7f"
    result = mergestream("pull", "hf://org/store", tmp_path / "pulled")
    assert result.code == 1 and "is damaged" in result.err and result.err.count("error:") == 1
    assert not (tmp_path / "pulled").exists()
    pushed[name] = good
    assert mergestream("pull", "hf://org/store", tmp_path / "pulled").code == 0
    assert parts(tmp_path / "pulled") == parts(store.path)


def test_a_pull_that_broke_off_goes_on(tmp_path: Path, store: Store, hub: Hub, mergestream: RunCommand) -> None:
    store.push("org/store", private=True)
    asked: list[str] = []

    def broken(path: str) -> bool:
        asked.append(path)
        return path.endswith("experts/0003/tensors.json")

    hub.refuse = broken
    result = mergestream("pull", "hf://org/store", tmp_path / "pulled")
    assert result.code == 1 and "org/store cannot be pulled (" in result.err and "again to resume" in result.err
    assert not (tmp_path / "pulled").exists()
    got = [name for name in parts(tmp_path / ".pulled.pull") if not name.startswith(".cache")]

    def whole(path: str) -> bool:
        asked.append(path)
        return False

    hub.refuse = whole
    asked.clear()
    assert mergestream("pull", "hf://org/store", tmp_path / "pulled").code == 0
    assert parts(tmp_path / "pulled") == parts(store.path)
    assert got and not any(path.endswith(f"/{name}") for name in got for path in asked), "nothing is sent twice"


def test_who_may_see_where_things_lie_is_told(store: Store, hub: Hub) -> None:
    with pytest.warns(MergestreamWarning, match="readers of org/store see the local paths"):
        store.push("org/store")


def test_a_base_that_is_elsewhere(tmp_path: Path, toys: Toys, hub: Hub, mergestream: RunCommand) -> None:
    shutil.copytree(toys.base, tmp_path / "base")
    store = Store.create(tmp_path / "store", tmp_path / "base")
    store.add(toys.experts[0])
    store.push("org/store")
    shutil.rmtree(tmp_path / "base")
    assert mergestream("pull", "hf://org/store", tmp_path / "one").code == 0
    result = mergestream("pull", "hf://org/store", tmp_path / "two", "--base", toys.experts[1])
    assert result.code == 1 and "the base has changed" in result.err and not (tmp_path / "two").exists()
    assert mergestream("pull", "hf://org/store", tmp_path / "two", "--base", toys.base).code == 0
    assert Store(tmp_path / "two").manifest.base.source == str(toys.base)
    Store(tmp_path / "two").verify()


def test_only_what_is_of_a_store_is_pulled(tmp_path: Path, store: Store, hub: Hub) -> None:
    store.push("org/store")
    more = {"evil.py": b"", "steps/0001/../../../x": b"", "steps/0001/.hidden": b"", "steps/0001/a/b": b"", "lock": b""}
    hub.files("org/store").update(more)
    Store.pull("org/store", tmp_path / "pulled")
    assert parts(tmp_path / "pulled") == parts(store.path)


def test_what_cannot_be_pulled_or_pushed_is_one_sentence(tmp_path: Path, store: Store, hub: Hub) -> None:
    with pytest.raises(
        MergestreamError,
        match=r"org/absent is no local path, and the hub does not show it; check the spelling",
    ):
        Store.pull("hf://org/absent", tmp_path / "pulled")
    store.export(tmp_path / "out")
    from mergestream.hub.transfer import push_model

    push_model(tmp_path / "out", "org/model")
    with pytest.raises(MergestreamError, match="org/model holds no store"):
        Store.pull("hf://org/model", tmp_path / "pulled")
    with pytest.raises(
        MergestreamError, match=r"org/model holds \S+, which is not part of a store; push the store elsewhere"
    ):
        store.push("hf://org/model")
    with pytest.raises(UsageError, match="write hf://ORG/NAME"):
        Store.pull("https://org/model", tmp_path / "pulled")
    with pytest.raises(MergestreamError, match="exists already and is not empty"):
        Store.pull("hf://org/model", store.path)
    assert not (tmp_path / "pulled").exists()
