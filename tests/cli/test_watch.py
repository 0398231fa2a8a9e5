"""Experts that appear in a directory are absorbed when they are complete, each once."""

from __future__ import annotations

import torch
from safetensors.torch import save, save_file

from mergestream import Average, Store
from mergestream.cli.watch import Watcher


def model(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"a.weight": torch.randn(8, 6), "a.bias": torch.randn(8)}


def test_an_expert_is_added_when_it_no_longer_changes(tmp_path):
    save_file(model(0), tmp_path / "base.safetensors")
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    store = Store.create(tmp_path / "store", tmp_path / "base.safetensors", Average())
    watcher = Watcher(store, incoming)

    whole = save(model(1))
    (incoming / "one.safetensors").write_bytes(whole[:100])
    watcher.look()
    (incoming / "one.safetensors").write_bytes(whole)
    watcher.look()
    assert store.history == (), "it was still growing between the two looks"
    watcher.look()
    assert [entry.name for entry in store.history] == ["one"]
    watcher.look()
    assert len(store.history) == 1, "it is not added twice"


def test_a_bad_file_is_told_once_and_does_not_stop_the_watch(tmp_path, capsys):
    save_file(model(0), tmp_path / "base.safetensors")
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    store = Store.create(tmp_path / "store", tmp_path / "base.safetensors", Average())
    watcher = Watcher(store, incoming)
    (incoming / "bad.safetensors").write_bytes(b"nonsense")
    save_file(model(2), incoming / "good.safetensors")
    for _ in range(4):
        watcher.look()
    assert [entry.name for entry in store.history] == ["good"]
    assert capsys.readouterr().err.count("error:") == 1
