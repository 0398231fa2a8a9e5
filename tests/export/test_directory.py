"""Checkpoints out: whole or not at all, never stale, rounded once."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mergestream import Average, MergestreamError, Store
from mergestream.errors import UsageError
from mergestream.export.directory import Output
from tests.conftest import files, save_model, toy_base, toy_expert


@pytest.fixture
def store(tmp_path, toys) -> Store:
    store = Store.create(tmp_path / "store", toys.base, Average())
    store.add(toys.experts[0])
    return store


def test_the_first_expert_of_an_average_comes_out_as_it_came_in(store, tmp_path):
    merged = load_file(store.export(tmp_path / "merged") / "model.safetensors")
    for name, tensor in toy_expert(1).items():
        assert merged[name].dtype == tensor.dtype
        rounding = 2**-8 if tensor.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(merged[name], tensor, rtol=rounding, atol=1e-7)


def test_shards_hold_at_most_what_they_may_and_the_index_says_where(store, tmp_path):
    out = store.export(tmp_path / "merged", max_shard_size=800)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = {}
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        assert sum(t.numel() * t.element_size() for t in tensors.values()) <= 800
        assert all(index["weight_map"][name] == path.name for name in tensors)
        found |= tensors
    assert found.keys() == toy_base().keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in toy_base().values())
    whole = load_file(store.export(tmp_path / "whole") / "model.safetensors")
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_floats_get_the_dtype_asked_for_and_integers_keep_theirs(dtype, store, tmp_path):
    merged = load_file(store.export(tmp_path / "merged", dtype=dtype) / "model.safetensors")
    for name, tensor in toy_base().items():
        assert merged[name].dtype == (getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype)


def test_values_that_float16_cannot_hold_are_refused(tmp_path):
    base = save_model(tmp_path / "base", toy_base() | {"layers.0.q.weight": torch.full((8, 8), 1e5)})
    store = Store.create(tmp_path / "store", base, Average())
    store.add(save_model(tmp_path / "expert", toy_expert(1) | {"layers.0.q.weight": torch.full((8, 8), 1.1e5)}))
    with pytest.raises(MergestreamError, match=r"layers.0.q.weight has values that float16 cannot hold.*bfloat16"):
        store.export(tmp_path / "merged", dtype="float16")
    assert not (tmp_path / "merged").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "expert", "store"], "no draft is left"


def test_the_directory_is_readable_like_any_other(store, tmp_path):
    out = store.export(tmp_path / "merged")
    (tmp_path / "plain").mkdir()
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) & 0o444 == 0o444


def test_parents_are_made(store, tmp_path):
    assert (store.export(tmp_path / "a" / "b" / "merged") / "model.safetensors").is_file()


def test_a_draft_becomes_the_output_only_when_all_went_well(tmp_path):
    output = Output(tmp_path / "model")
    with pytest.raises(RuntimeError), output.draft() as draft:
        (draft / "half").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with output.draft() as draft:
        (draft / "all").touch()
        assert not output.path.exists()
    assert files(tmp_path) == {"model/all": b""}


def test_overwriting_leaves_nothing_of_the_old_one(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    with pytest.raises(MergestreamError, match="--overwrite"):
        Output(tmp_path / "model")
    with pytest.raises(RuntimeError), Output(tmp_path / "model", overwrite=True).draft():
        raise RuntimeError
    assert files(tmp_path) == {"model/old": b""}
    with Output(tmp_path / "model", overwrite=True).draft() as draft:
        (draft / "new").touch()
    assert files(tmp_path) == {"model/new": b""}


def test_a_dtype_that_does_not_exist_is_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match="float8"):
        Output(tmp_path / "model", dtype="float8")


def test_companions_that_are_strange_do_not_matter(tmp_path):
    base = save_model(tmp_path / "base", toy_base())
    (base / "config.json").write_text('{"_name_or_path": null, "torch_dtype": "float32"}')
    (base / "folder.json").mkdir()
    (base / "source.spm").write_bytes(b"pieces")
    (base / "model.safetensors.index.json.bak").write_text("{}")
    store = Store.create(tmp_path / "store", base, Average())
    store.add(save_model(tmp_path / "expert", toy_expert(1)))
    out = store.export(tmp_path / "merged", dtype="bfloat16")
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    written = {path.name for path in out.iterdir() if path.suffix != ".png"}
    assert written == {"README.md", "config.json", "model.safetensors", "source.spm"}
    assert "base_model:" not in (out / "README.md").read_text(), "no hub id is known"


def test_the_config_of_an_expert_with_a_head_is_kept_only_if_it_is_json(tmp_path):
    def model(name: str, seed: int) -> Path:
        return save_model(tmp_path / name, {**toy_expert(seed), "head.weight": torch.full((2, 3), float(seed))})

    store = Store.create(tmp_path / "store", model("base", 0), Average(), heads=["head.*"])
    expert = model("expert", 1)
    (expert / "config.json").write_text('{"limits": [0, Infinity]}')
    with pytest.raises(MergestreamError, match=r"config\.json is not valid JSON of finite numbers"):
        store.add(expert)
    assert not store.history


def test_an_empty_store_has_nothing_to_export(tmp_path, toys):
    with pytest.raises(MergestreamError, match="add an expert first"):
        Store.create(tmp_path / "store", toys.base).export(Path(tmp_path / "merged"))
