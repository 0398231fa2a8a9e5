"""Exports are pushed in one commit, with card and recipe; what goes wrong is a sentence, and goes on."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest

from mergestream import Store
from tests.conftest import RunCommand, Toys, files
from tests.hub.conftest import Hub, weights
from tests.hub_server import COMMIT, TOKEN


@pytest.fixture
def store(tmp_path: Path, toys: Toys) -> Path:
    store = Store.create(tmp_path / "store", toys.base)
    store.add(toys.experts[0])
    return store.path


def test_an_export_is_pushed_with_its_card(tmp_path: Path, store: Path, hub: Hub, done: Callable[..., str]) -> None:
    said = done("export", store, tmp_path / "out", "--max-shard-size", "1000B", "--push", "org/merged", "--private")
    assert "out pushed to http://127.0.0.1" in said and said.rstrip().endswith("org/merged")
    pushed = hub.files("org/merged")
    assert {name: data for name, data in pushed.items() if name != ".gitattributes"} == files(tmp_path / "out")
    assert {"README.md", "mergestream.json", "model.safetensors.index.json"} < pushed.keys()
    assert hub.private == {"org/merged"} and hub.commits == 1
    pushed["LICENSE"] = b"theirs"
    done("export", store, tmp_path / "out", "--overwrite", "--push", "hf://org/merged")
    assert hub.files("org/merged").keys() == {".gitattributes", "LICENSE", *files(tmp_path / "out")}, "no old shard"
    answered = json.loads(done("push", tmp_path / "out", "org/other", "--json"))
    assert answered["pushed"].endswith("/org/other")


def test_a_push_that_broke_off_goes_on(tmp_path: Path, store: Path, hub: Hub, mergestream: RunCommand) -> None:
    export = ("export", store, tmp_path / "out", "--max-shard-size", "1000B", "--push", "org/merged")
    hub.refuse = lambda path: path.startswith("/lfs/") and len(hub.received) >= 2
    result = mergestream(*export)
    assert result.code == 1 and result.err.count("error:") == 1
    assert "out was written but not pushed: org/merged cannot be pushed to (the hub answered 410)" in result.err
    assert "to push it later: mergestream push" in result.err and TOKEN not in result.out + result.err
    assert hub.files("org/merged").keys() == {".gitattributes"}, "all or nothing"
    before, hub.refuse = len(hub.received), lambda path: False
    assert before >= 2
    assert mergestream("push", tmp_path / "out", "org/merged").code == 0
    assert len(hub.received) == len(set(hub.received)) <= weights(tmp_path / "out"), "nothing twice"
    assert files(tmp_path / "out").items() <= hub.files("org/merged").items()


def test_what_was_to_be_private_goes_to_no_public_repository(
    tmp_path: Path, store: Path, hub: Hub, mergestream: RunCommand
) -> None:
    hub.repositories["org/public"] = {COMMIT: {}}
    result = mergestream("export", store, tmp_path / "out", "--push", "org/public", "--private")
    assert result.code == 1 and "org/public exists and is public" in result.err
    assert not hub.received and not hub.commits


def test_a_model_goes_to_no_repository_of_a_store(
    tmp_path: Path, store: Path, hub: Hub, mergestream: RunCommand
) -> None:
    assert mergestream("push", store, "hf://org/store").code == 0
    result = mergestream("export", store, tmp_path / "out", "--push", "org/store")
    assert result.code == 1 and "org/store holds a store" in result.err


def test_what_cannot_be_pushed_is_one_sentence(
    tmp_path: Path, store: Path, hub: Hub, mergestream: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(store).export(tmp_path / "out")

    def refused(address: str) -> str:
        result = mergestream("push", tmp_path / "out", address)
        assert result.code in (1, 2) and result.err.count("error:") == 1 and "hf_" not in result.out + result.err
        return result.err

    assert "the token may not write to theirs/model; use one with write access to theirs" in refused("theirs/model")
    assert "nowhere is not a repository on the hub: write hf://ORG/NAME" in refused("nowhere")
    assert "is not a repository on the hub" in refused("hf://org/../x")
    monkeypatch.setenv("HF_TOKEN", "hf_anotherone")
    assert "the hub does not accept the token; log in with" in refused("org/model")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        unused = f"http://127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", unused)
    assert "org/model cannot be pushed to (" in refused("org/model")
    monkeypatch.delenv("HF_TOKEN")
    assert "there is no token for the hub: log in with `hf auth login`, or set HF_TOKEN" in refused("org/model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'mergestream[hub]'" in refused("org/model")
    result = mergestream("export", store, tmp_path / "more", "--push", "org/model")
    assert result.code == 1 and not (tmp_path / "more").exists(), "told before the work"


def test_wrong_usage(tmp_path: Path, store: Path, mergestream: RunCommand) -> None:
    assert mergestream("export", store, tmp_path / "out", "--private").code == 2
    assert mergestream("export", store, tmp_path / "out", "--push", "org").code == 2
    assert not (tmp_path / "out").exists()


def test_only_exports_and_stores_are_pushed(tmp_path: Path, toys: Toys, hub: Hub, mergestream: RunCommand) -> None:
    result = mergestream("push", toys.base, "org/model")
    assert result.code == 1 and "is neither a store nor an export of mergestream" in result.err
