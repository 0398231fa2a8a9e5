"""What is damaged on disk is told by whoever reads it, and nothing is made of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mergestream import OPCM, TIES, Average, Ledger, MergestreamError, Store
from mergestream.methods import make_method
from mergestream.storage import open_storage
from tests.conftest import RunCommand, Toys, files, save_model, toy_base, toy_expert
from tests.handmade import handmade_adapter


def flip(path: Path, tensor: str) -> None:
    """Change the lowest bit of a tensor in a file, in place: links see it, too."""
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    position = length + json.loads(data[8:length])[tensor]["data_offsets"][0]
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([data[position] ^ 1]))


@pytest.mark.parametrize(
    ("method", "slot"),
    [(OPCM(), "sum"), (Average(), "sum"), (TIES(density=0.4), "merged")],
    ids=["opcm", "average", "ties"],
)
@pytest.mark.parametrize("name", ["layers.0.q.weight", "layers.0.down.bias"])
def test_a_damaged_state_is_neither_exported_nor_built_on(
    method: Any, slot: str, name: str, tmp_path: Path, toys: Toys, mergestream: RunCommand
) -> None:
    store = Store.create(tmp_path / "store", toys.base, method)
    for expert in toys.experts[:2]:
        store.add(expert)
    path = store.path / "steps/0002/model.safetensors"
    flip(path, f"{slot}:{name}")
    before = files(store.path)
    for words in (
        ("export", store.path, tmp_path / "out"),
        ("inspect", store.path, toys.experts[2]),
        ("add", store.path, toys.experts[2]),
        ("diff", store.path, "0", "2"),
    ):
        result = mergestream(*words)
        assert result.code == 1 and len(result.err.splitlines()) == 1, result
        assert f"{path} is damaged: the digest of {slot}:{name} does not match; go back to before it" in result.err
    assert files(store.path) == before and not (tmp_path / "out").exists()
    store.undo()
    store.verify()
    store.export(tmp_path / "out")


def test_undo_is_not_advised_for_factors_that_steps_share(tmp_path: Path, toys: Toys) -> None:
    store = Store.create(tmp_path / "store", toys.base, OPCM())
    for number in (1, 2):
        store.add(handmade_adapter(tmp_path / f"adapter-{number}", number))
    first, second = (store.path / "steps/0002" / f"factors-000{number}.safetensors" for number in (1, 2))
    assert first.samefile(store.path / "steps/0001" / first.name)
    flip(second, "left:layers.0.up.weight")
    with pytest.raises(MergestreamError, match=rf"{second} is damaged: .*left:layers.0.up.weight.*; go back .* undo"):
        store.export(tmp_path / "out")
    flip(second, "left:layers.0.up.weight")
    flip(first, "left:layers.0.up.weight")
    for attempt in (
        lambda: store.export(tmp_path / "out"),
        lambda: store.add(handmade_adapter(tmp_path / "adapter-3", 3)),
    ):
        with pytest.raises(MergestreamError, match=rf"{first} is damaged: .*undo does not help: restore the store"):
            attempt()
    assert not (tmp_path / "out").exists() and len(Store(store.path).history) == 2


def test_an_index_of_factors_that_was_changed_is_damaged(tmp_path: Path, toys: Toys) -> None:
    store = Store.create(tmp_path / "store", toys.base, OPCM())
    store.add(handmade_adapter(tmp_path / "adapter", 1, rank=2))
    path = store.path / "steps/0001/factors.json"
    index = json.loads(path.read_text())
    index["sum:layers.0.up.weight"]["left"] = [[1, 1]]
    path.write_text(json.dumps(index))
    for attempt in (store.verify, lambda: store.export(tmp_path / "out")):
        with pytest.raises(MergestreamError, match=rf"{path} is damaged: it does not match its digest"):
            attempt()


def test_a_damaged_head_is_not_put_in_place(tmp_path: Path) -> None:
    head = {"head.weight": torch.ones(2, 3)}
    base = save_model(tmp_path / "base", toy_base() | head)
    store = Store.create(tmp_path / "store", base, Average(), heads=["head.*"])
    store.add(save_model(tmp_path / "expert", toy_expert(1) | head))
    path = store.path / "experts/0001/heads.safetensors"
    flip(path, "head.weight")
    with pytest.raises(MergestreamError, match=rf"{path} is damaged: the digest of head.weight does not match"):
        store.export(tmp_path / "out", task="expert")
    assert not (tmp_path / "out").exists()


def test_a_damaged_record_is_told_by_report(tmp_path: Path, toys: Toys, mergestream: RunCommand) -> None:
    store = Store.create(tmp_path / "store", toys.base, Average())
    store.add(toys.experts[0])
    record = store.path / "experts/0001/tensors.json"
    record.write_text(record.read_text().replace('"kept": 1.0', '"kept": 0.5', 1))
    assert f"{record} is damaged" in mergestream("report", store.path, "--format", "md").err


def test_verify_covers_the_scores(tmp_path: Path, toys: Toys) -> None:
    store = Store.create(tmp_path / "store", toys.base, Average())
    store.add(toys.experts[0])
    store.attach_scores(["task"], [[0.5]])
    store.verify()
    path = store.path / "scores.json"
    path.write_text(path.read_text().replace("0.5", "0.6"))
    with pytest.raises(MergestreamError, match=r"scores\.json is damaged"):
        store.verify()


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path, toys: Toys) -> None:
    store = Store.create(tmp_path / "store", toys.base, Average())
    store.add(toys.experts[0])
    before = files(store.path)
    (expert,) = store.history
    twice = store.manifest.with_expert(expert)
    with pytest.raises(MergestreamError, match=r"not written: .*two experts have the same name"):
        twice.save(open_storage(store.path))
    assert files(store.path) == before


def test_an_expert_of_a_ledger_without_an_entry_is_told(tmp_path: Path, toys: Toys) -> None:
    store = Store.create(tmp_path / "store", toys.base, Ledger())
    expert = store.add(toys.experts[0], name="ring")
    forged = store.manifest.replacing(expert, dataclasses.replace(expert, cut=0))
    with pytest.raises(MergestreamError, match="the expert 'ring' has no entry in the ledger"):
        forged.save(open_storage(store.path))


@pytest.mark.parametrize("value", [None, [], 10**400, "x"], ids=["null", "list", "long", "text"])
def test_a_parameter_that_is_no_number_is_told(value: Any) -> None:
    with pytest.raises(MergestreamError, match=r"opcm: alpha=.* is not a number"):
        make_method("opcm", {"alpha": value})
