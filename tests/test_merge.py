"""merge: all experts in one go give what a store gives."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import mergestream
from mergestream import EMA, LAWA, OPCM, TIES, Average, LocalEngine, MagMax, MergestreamError, Store, TaskArithmetic
from tests.conftest import files, save_model, toy_base, toy_expert

METHODS = [
    OPCM(alpha=0.3),
    Average(),
    TaskArithmetic(scale=0.4),
    TIES(),
    TIES(mode="streaming"),
    TIES(mode="reference", trim="tensor"),
    EMA(beta=0.7),
    LAWA(window=2),
    MagMax(),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_merge_equals_a_store_bit_for_bit(method, tmp_path, toys):
    store = Store.create(tmp_path / "store", toys.base, method)
    for expert in toys.experts:
        store.add(expert)
    store.export(tmp_path / "through-a-store", max_shard_size=1000)
    for workers in (1, 3):
        out = tmp_path / f"merged-{workers}"
        mergestream.merge(toys.base, toys.experts, out, method, max_shard_size=1000, engine=LocalEngine(workers))
        assert files(out, ".safetensors", ".json") == files(tmp_path / "through-a-store", ".safetensors", ".json")
        table = [line for line in (out / "README.md").read_text().splitlines() if line.startswith(("|", "* λ"))]
        expected = (tmp_path / "through-a-store" / "README.md").read_text()
        assert len(table) >= 6 and all(line in expected for line in table)
    assert not list(tmp_path.glob(".*")), "no temporary store is left"


def test_what_a_killed_merge_has_left_is_removed_by_the_next(tmp_path, toys):
    for left in (".[a]*.store-killed", ".[a]*.mergestream-killed", ".b.store-other"):
        save_model(tmp_path / left, toy_base())
    mergestream.merge(toys.base, toys.experts[:2], tmp_path / "[a]*", OPCM())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.store-other", "[a]*"]


@pytest.mark.parametrize("method", [OPCM(), Average()], ids=repr)
def test_duplicates_and_the_base_are_refused_unless_allowed(method, tmp_path, toys):
    for experts, sentence in (
        ([toys.experts[0], toys.experts[0]], "expert-1"),
        ([toys.experts[0], toys.base], "the base"),
    ):
        with pytest.raises(MergestreamError, match=rf"{sentence}.*--allow-duplicate"):
            mergestream.merge(toys.base, experts, tmp_path / "merged", method)
        assert list(tmp_path.iterdir()) == [], "nothing is left"
    mergestream.merge(toys.base, [toys.experts[0], toys.experts[0]], tmp_path / "merged", method, allow_duplicate=True)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == toy_base().keys()


@pytest.mark.parametrize("method", [OPCM(), Average()], ids=repr)
def test_partial_and_ignored_tensors_are_the_same_both_ways(method, tmp_path, toys):
    part = {name: tensor for name, tensor in toy_expert(5).items() if name != "layers.0.q.weight"}
    experts = [toys.experts[0], save_model(tmp_path / "part", part)]
    store = Store.create(tmp_path / "store", toys.base, method)
    for expert in experts:
        store.add(expert, partial=True, ignore=["embed*"])
    store.export(tmp_path / "through-a-store")
    mergestream.merge(toys.base, experts, tmp_path / "merged", method, partial=True, ignore=["embed*"])
    assert files(tmp_path / "merged", ".safetensors") == files(tmp_path / "through-a-store", ".safetensors")


@pytest.mark.parametrize("method", [OPCM(), Average()], ids=repr)
def test_nan_is_refused_and_nothing_is_written(method, tmp_path, toys):
    bad = toy_expert(1)
    bad["layers.0.up.weight"][0, 0] = torch.inf
    with pytest.raises(MergestreamError, match=r"layers.0.up.weight in model.safetensors of \S*bad holds NaN or Inf"):
        mergestream.merge(toys.base, [toys.experts[1], save_model(tmp_path / "bad", bad)], tmp_path / "out", method)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]
