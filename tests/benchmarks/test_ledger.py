import os
from pathlib import Path

import pytest
import torch

from benchmarks import cases, checkpoints, ledger, ledger_growth
from benchmarks.measure import disk_bytes
from mergestream import Ledger
from mergestream.checkpoints import open_checkpoint
from mergestream.store.store import Store


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> checkpoints.Family:
    tiny = checkpoints.llama(1, hidden=64, wide=96, heads=4, vocabulary=50, dtype=torch.float32)
    monkeypatch.setitem(checkpoints.MODELS, "tiny", tiny)
    return checkpoints.family("tiny", 3, tmp_path)


def test_the_bare_kernels_of_an_export_give_what_it_writes(family: checkpoints.Family, tmp_path: Path) -> None:
    store = cases.store_with(tmp_path / "store", family, Ledger(), 3)
    Store(store).export(tmp_path / "merged")
    jobs = ledger.spans(store)
    with open_checkpoint(family.base) as base, open_checkpoint(tmp_path / "merged") as merged:
        names = [name for name in Store(store).manifest.base.merged if len(base.tensors[name].shape) == 2]
        assert len(names) == len(jobs)
        for name, (span, linear) in zip(names, jobs, strict=True):
            expected = merged.read(name) - base.read(name)
            found = ledger.agree_kernels(span, linear) / (1 if linear else 3)
            assert float((found - expected).norm() / expected.norm()) < 1e-3, name


def test_the_bare_kernels_of_an_add_give_what_a_store_keeps(family: checkpoints.Family, tmp_path: Path) -> None:
    store = cases.store_with(tmp_path / "store", family, Ledger(), 1)
    found = ledger.add_kernels(family.base, family.experts[0])
    with Store(store).snapshot() as snapshot:
        (reader,) = snapshot.readers.values()
        kept = {name: reader.read(name).get("sigma") for name in snapshot.manifest.base.merged}
    matrices = {name for name, sigma in kept.items() if sigma is not None}
    assert matrices == found.keys()
    for name in matrices:
        torch.testing.assert_close(found[name].double(), kept[name], rtol=1e-4, atol=0)


def test_the_entries_of_few_experts_are_read_as_they_are(family: checkpoints.Family, tmp_path: Path) -> None:
    store = cases.store_with(tmp_path / "store", family, Ledger(), 3)
    expected = ledger_growth.entries_bytes(Store(store).manifest.base, Ledger(), 3)
    with Store(store).snapshot() as snapshot:
        assert sum(reader.nbytes for reader in snapshot.readers.values()) == expected
    assert disk_bytes(store) > expected


def test_a_file_under_two_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    os.link(tmp_path / "a", tmp_path / "b")
    assert disk_bytes(tmp_path) == 1000


def test_more_experts_than_eight_share_the_room(family: checkpoints.Family, tmp_path: Path) -> None:
    base = Store.create(tmp_path / "store", family.base, Ledger()).manifest.base
    one, eight, sixteen = (ledger_growth.entries_bytes(base, Ledger(), count) for count in (1, 8, 16))
    assert eight == 8 * one
    assert sixteen < 1.1 * eight
