"""A ledger on disk: an entry an expert, and nothing else is touched."""

from __future__ import annotations

import math
import resource
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from mergestream import OPCM, Average, Ledger, Store, TaskArithmetic
from mergestream.errors import MergestreamError, UsageError
from mergestream.store import shorten
from mergestream.testing import (
    assert_same,
    exported,
    load_model,
    make_models,
    make_store,
    save_models,
)
from tests.conftest import files
from tests.ledger.merging import ledger_of


@pytest.fixture
def models() -> Any:
    return make_models(20)


@pytest.fixture
def paths(models: Any, tmp_path: Path) -> list[Path]:
    return save_models(tmp_path, models)


def entry_files(store: Store) -> dict[str, bytes]:
    return files(store.path / "steps")


def names(store: Store) -> list[str]:
    return [entry.name for entry in store.history]


def test_adding_writes_one_entry_and_touches_no_other(tmp_path: Path, paths: list[Path]) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:4])
    before = entry_files(store)
    store.add(paths[4])
    after = entry_files(store)
    assert {name: after[name] for name in before} == before
    assert {Path(name).parts[0] for name in after.keys() - before.keys()} == {"0004"}


def test_an_entry_is_laid_out_by_the_rank_rule(tmp_path: Path, paths: list[Path]) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:13])
    for number in (1, 8, 12):
        tensors = load_file(tmp_path / "store" / "steps" / f"{number:04d}" / "model.safetensors")
        kept = math.floor(24 / max(8, number))
        assert tensors["left:a.weight"].shape == (kept, 40) and tensors["right:a.weight"].shape == (kept, 24)
        assert tensors["left:a.weight"].dtype == torch.bfloat16
        assert tensors["sigma:a.weight"].shape == (3,), "as many as it asks for: these are never cut"
        assert tensors["sigma:a.weight"].dtype == torch.float64
        assert torch.equal(tensors["sigma:a.weight"], tensors["sigma:a.weight"].sort(descending=True).values)
        assert tensors["delta:a.bias"].shape == (40,) and tensors["delta:a.bias"].dtype == torch.float32
        assert tensors["norm2:a.weight"].item() >= tensors["sigma:a.weight"].square().sum().item()
    assert [entry.cut for entry in store.history] == [8] * 8 + [9, 10, 11, 12]


def test_what_is_thin_is_kept_whole(tmp_path: Path) -> None:
    shapes = {"token.weight": (1, 30), "thin.weight": (7, 30), "a.weight": (8, 30)}
    base, expert = make_models(1, shapes=shapes)
    store = make_store(tmp_path / "store", Ledger(), *_saved(tmp_path, base, expert))
    stored = load_file(tmp_path / "store" / "steps" / "0001" / "model.safetensors")
    assert {"delta:token.weight", "delta:thin.weight", "left:a.weight"} <= stored.keys()
    back = exported(store, readout="expert:expert1")
    assert torch.equal(back["token.weight"], base["token.weight"] + (expert["token.weight"] - base["token.weight"]))
    torch.testing.assert_close(back["thin.weight"], expert["thin.weight"])


def _saved(directory: Any, *models: Any) -> Any:
    base, *experts = save_models(directory, models)
    return base, experts


def test_undo_drops_the_last_entry_as_often_as_there_is_one(tmp_path: Path, paths: list[Path]) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:2])
    before = files(store.path, ".json", ".safetensors")
    store.add(paths[2])
    store.undo()
    assert files(store.path, ".json", ".safetensors") == before
    store.undo()
    assert names(store) == [] and not entry_files(store)


@pytest.mark.parametrize("removed", [1, 3, 5])
def test_any_expert_can_be_removed_and_the_store_goes_on(
    tmp_path: Path, paths: list[Path], models: Any, removed: int
) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:6])
    before = entry_files(store)
    gone = store.remove(f"expert{removed}")
    assert gone.name == f"expert{removed}" and gone.name not in names(store)
    store.verify()
    assert entry_files(store) == before, "undo needs the files"
    store.keep(0)
    after = entry_files(store)
    assert after == {name: before[name] for name in before if not name.startswith(f"000{removed}/")}
    store.add(paths[6])
    store.verify()
    rest = [number for number in (1, 2, 3, 4, 5, 6) if number != removed]
    assert_same(exported(store), ledger_of(models, rest).state_dict(), "after a removal and another add")
    norms = [entry.norm for entry in store.history]
    assert store.history[-1].mean_norm == pytest.approx(sum(norms) / len(norms), rel=1e-12)
    store.add(paths[removed])
    assert_same(exported(store), ledger_of(models, [1, 2, 3, 4, 5, 6]).state_dict(), "and it came back")


@pytest.mark.parametrize("removed", [1, 3, 5])
def test_undo_brings_the_removed_expert_back(tmp_path: Path, paths: list[Path], models: Any, removed: int) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:6])
    before = files(store.path / "steps", ""), files(store.path / "experts", ""), store.manifest.history
    store.remove(f"expert{removed}")
    store.add(paths[6])
    assert store.undo().name == "expert6", "the last command was an add"
    assert store.undo().name == f"expert{removed}"
    store.verify()
    assert before == (files(store.path / "steps", ""), files(store.path / "experts", ""), store.manifest.history)
    assert not store.manifest.removed
    assert store.undo().name == "expert5"


def test_undo_goes_back_as_many_removals_as_are_kept(tmp_path: Path, paths: list[Path]) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:5])
    for name in ("expert4", "expert1"):
        store.remove(name)
    assert [removal.expert.name for removal in store.manifest.removed] == ["expert4", "expert1"]
    assert store.undo().name == "expert1" and names(store) == ["expert1", "expert2", "expert3"]
    assert store.undo().name == "expert3", "the files of expert4 are gone"
    store.keep(2)
    for name in ("expert2", "expert1"):
        store.remove(name)
    assert [store.undo().name, store.undo().name] == ["expert1", "expert2"]
    store.remove("expert1")
    store.keep(0)
    assert Store(store.path).undo().name == "expert2"


def test_a_removal_that_cannot_be_committed_changes_nothing(tmp_path: Path, paths: list[Path]) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:4])
    before = files(store.path, ".json", ".safetensors")
    with (
        patch("mergestream.store.manifest.Manifest.save", side_effect=MergestreamError("disk full")),
        pytest.raises(MergestreamError),
    ):
        store.remove("expert2")
    assert files(store.path, ".json", ".safetensors") == before
    Store(store.path).verify()


def test_a_removal_that_was_killed_before_it_tidied_is_complete(tmp_path: Path, paths: list[Path]) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:4])
    store.keep(0)
    with (
        patch("mergestream.store.maintain.clean_up_after_commit", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt, match="was complete"),
    ):
        store.remove("expert2")
    again = Store(store.path)
    again.verify()
    assert names(again) == ["expert1", "expert3"]
    again.add(paths[4])
    assert sorted(path.name for path in (store.path / "steps").iterdir()) == ["0001", "0003", "0004"]


def test_entries_are_shortened_when_they_hold_twice_what_is_read(
    tmp_path: Path, paths: list[Path], models: Any
) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:16])
    assert {entry.cut for entry in store.history} == {8, 9, 10, 11, 12, 13, 14, 15}
    before = _bytes(store)
    store.add(paths[16])
    assert [entry.cut for entry in store.history] == [16] * 8 + [9, 10, 11, 12, 13, 14, 15, 16]
    assert _bytes(store) < before
    store.verify()
    assert_same(exported(store), ledger_of(models, range(1, 17)).state_dict(), "shortened")
    assert len(list((store.path / "steps").iterdir())) == len(list((store.path / "experts").iterdir())) == 16
    store.remove("expert1")
    store.undo()
    store.verify()
    exported(store)


def test_shortening_that_fails_leaves_longer_entries_and_the_next_step_does_it(
    tmp_path: Path, paths: list[Path]
) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:16])
    with patch.object(shorten, "_write", side_effect=MergestreamError("full")):
        store.add(paths[16])
    assert not (store.path / "steps" / "0017").exists()
    again = Store(store.path)
    assert len(again.history) == 16 and {entry.cut for entry in again.history[:8]} == {8}
    again.verify()
    again.add(paths[17])
    assert {entry.cut for entry in again.history[:8]} == {17}
    again.verify()


def test_entries_with_nothing_to_cut_are_not_written_again(tmp_path: Path) -> None:
    base, *experts = save_models(tmp_path, make_models(16, shapes={"a.weight": (8, 30)}))
    store = make_store(tmp_path / "store", Ledger(), base, experts[:15])
    before = entry_files(store)
    store.add(experts[15])
    after = entry_files(store)
    assert {name: after[name] for name in before} == before
    assert [entry.cut for entry in store.history] == [16] * 8 + [9, 10, 11, 12, 13, 14, 15, 16]
    store.verify()


def test_the_size_does_not_grow_with_the_experts(tmp_path: Path) -> None:
    shapes = {"a.weight": (128, 128), "b.weight": (128, 512)}
    models = make_models(30, shapes=shapes)
    base, *experts = save_models(tmp_path, models)
    store = make_store(tmp_path / "store", Ledger(), base)
    room = 2 * sum(min(shape) * sum(shape) for shape in shapes.values())  # β·r directions in bfloat16
    sizes = []
    for expert in experts:
        store.add(expert)
        sizes.append(sum(path.stat().st_size for path in (store.path / "steps").rglob("*.safetensors")))
    assert sizes[7] < 1.1 * room
    assert max(sizes) < 2 * room


def _bytes(store: Store) -> int:
    return sum(len(content) for name, content in entry_files(store).items() if name.endswith(".safetensors"))


def test_a_damaged_entry_is_named_and_never_read_out(tmp_path: Path, paths: list[Path]) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:4])
    path = store.path / "steps" / "0002" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with pytest.raises(MergestreamError, match=r"steps/0002/model.safetensors is damaged.*remove the expert"):
        store.export(tmp_path / "out")
    with pytest.raises(MergestreamError, match=r"steps/0002/model.safetensors is damaged"):
        store.verify()
    assert not (tmp_path / "out").exists()
    store.export(tmp_path / "out", without=["expert2"])
    store.remove("expert2")
    store.verify()


def test_a_missing_entry_is_named(tmp_path: Path, paths: list[Path]) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:4])
    (store.path / "steps" / "0002").rename(tmp_path / "elsewhere")
    with pytest.raises(MergestreamError, match="0002"):
        store.export(tmp_path / "out")
    with pytest.raises(MergestreamError, match="0002 is missing"):
        store.verify()


def test_more_experts_than_files_may_be_open(tmp_path: Path, paths: list[Path]) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:21])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 10, hard))
    try:
        merged = exported(store)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_same(merged, exported(store), "with few files")


def test_heads_stay_with_their_experts_when_others_go(tmp_path: Path) -> None:
    models = [{**model, "head.weight": torch.full((3, 24), float(n))} for n, model in enumerate(make_models(3))]
    base, *experts = save_models(tmp_path, models)
    store = Store.create(tmp_path / "store", base, Ledger(), heads=["head.*"])
    for expert in experts:
        store.add(expert)
    store.remove("expert1")
    for number in (2, 3):
        out = store.export(tmp_path / f"{number}", task=f"expert{number}")
        assert torch.equal(load_model(out)["head.weight"], models[number]["head.weight"])


def test_every_step_can_be_read_again(tmp_path: Path, paths: list[Path], models: Any) -> None:
    """A ledger forgets nothing: the state after any step is the entries up to it."""
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:5])
    from mergestream.export.directory import Output
    from mergestream.export.model import Target, write_model

    output = Output(tmp_path / "two")
    with store.snapshot(2) as snapshot, output.draft() as draft:
        write_model(snapshot, Target(draft, output, store.engine, store.progress))
    assert_same(load_model(tmp_path / "two"), ledger_of(models, [1, 2]).state_dict(), "after two")


@pytest.mark.parametrize("method", [OPCM(), Average(), TaskArithmetic()], ids=str)
def test_other_methods_cannot_remove(tmp_path: Path, paths: list[Path], method: Any) -> None:
    store = make_store(tmp_path / "store", method, paths[0], paths[1:4])
    before = files(store.path, ".json", ".safetensors")
    for name in ("expert1", "expert3"):
        with pytest.raises(UsageError, match=f"only a ledger can remove any expert .* this store uses {method.name}"):
            store.remove(name)
    assert files(store.path, ".json", ".safetensors") == before


def test_an_unknown_expert_cannot_be_removed(tmp_path: Path, paths: list[Path]) -> None:
    store = make_store(tmp_path / "store", Ledger(), paths[0], paths[1:4])
    with pytest.raises(UsageError, match=r"no expert named expert9.*expert1, expert2, expert3"):
        store.remove("expert9")


# --- readouts of states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [OPCM(), Average(), TaskArithmetic()], ids=str)
def test_the_state_of_a_method_that_adds_up_can_be_read_out_isotropically(tmp_path: Path, method: Any) -> None:
    models = make_models(3, torch.float64)
    base = models[0]
    paths = save_models(tmp_path, models)
    store = make_store(tmp_path / "store", method, paths[0], paths[1:])
    merged = exported(store, readout="iso")
    state = {}
    with store.snapshot() as snapshot:
        for name in base:
            value = snapshot.state.read(name)["sum"]
            assert isinstance(value, torch.Tensor)
            state[name] = value.clone()
    for name, S in state.items():
        expected = S / 3
        if name in ("a.weight", "b.weight"):
            U, sigma, Vh = torch.linalg.svd(S, full_matrices=False)
            expected = sigma.mean() * U @ Vh
        torch.testing.assert_close(merged[name] - base[name], 1.5 * expected, rtol=1e-6, atol=1e-8)
    assert_same(exported(store, readout="plain"), exported(store), "plain")
