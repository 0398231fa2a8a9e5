"""What a store promises beside surviving a kill: the rest of the durable path."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mergestream import OPCM, TIES, Average, Ledger, LocalEngine, MergestreamError, Store
from mergestream.errors import StoreBusyError, UsageError
from mergestream.merging.step import Step
from mergestream.storage import open_storage
from mergestream.store.records import tensor_records
from tests.conftest import Toys, files, save_model, toy_base, toy_expert
from tests.faults.flips import meaning
from tests.handmade import handmade_adapter


@pytest.fixture
def store(tmp_path: Path, toys: Toys) -> Store:
    """A store that has absorbed two experts."""
    store = Store.create(tmp_path / "store", toys.base, OPCM())
    store.add(toys.experts[0])
    store.add(toys.experts[1])
    return store


def steps(store: Store) -> list[int]:
    return sorted(int(path.name) for path in (store.path / "steps").iterdir())


# --- same inputs, same bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [OPCM(), TIES(density=0.4)], ids=["opcm", "ties"])
def test_one_worker_and_many_give_the_same_bytes(method: Any, tmp_path: Path, toys: Toys) -> None:
    results = []
    for workers in (1, 2, 5):
        store = Store.create(tmp_path / f"store-{workers}", toys.base, method, engine=LocalEngine(workers))
        for expert in toys.experts[:3]:
            store.add(expert)
        store.export(tmp_path / f"model-{workers}")
        model = files(tmp_path / f"model-{workers}", ".safetensors")
        scalars = [(e.norm, e.kept, e.scale, e.mean_norm, e.distance, e.state, e.digest) for e in store.history]
        results.append((files(store.path, ".safetensors"), model, scalars))
    assert results[0] == results[1] == results[2]


def test_a_digest_does_not_depend_on_how_a_checkpoint_is_stored(tmp_path: Path, toys: Toys) -> None:
    tensors = toy_expert(1)
    torch.save(tensors, tmp_path / "expert.bin")
    digests = set()
    experts: list[Path | dict[str, torch.Tensor]] = [toys.experts[0], tmp_path / "expert.bin", tensors]
    for number, expert in enumerate(experts):
        digests.add(Store.create(tmp_path / f"store-{number}", toys.base, Average()).add(expert).digest)
    assert len(digests) == 1


def test_the_state_is_float32_and_float64_for_float64_and_none_for_integers(store: Store) -> None:
    state = load_file(store.path / "steps" / "0002" / "model.safetensors")
    base = toy_base()
    assert {name.partition(":")[2] for name in state} == {n for n, t in base.items() if t.is_floating_point()}
    for name, tensor in state.items():
        original = base[name.partition(":")[2]]
        assert tensor.dtype == (torch.float64 if original.dtype == torch.float64 else torch.float32)
        assert tensor.shape == original.shape


# --- undo and keep -----------------------------------------------------------------------------------------


def test_undo_takes_back_the_last_expert_and_its_bytes(tmp_path: Path, toys: Toys) -> None:
    store = Store.create(tmp_path / "store", toys.base)
    store.add(toys.experts[0])
    before = files(store.path, ".safetensors", ".json")
    store.add(toys.experts[1])
    assert store.undo().name == "expert-2"
    assert files(store.path, ".safetensors", ".json") == before
    assert store.undo().name == "expert-1"
    assert store.manifest.step == 0
    with pytest.raises(MergestreamError, match="nothing to undo"):
        store.undo()


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_keep_says_how_far_undo_can_go(keep: int, tmp_path: Path, toys: Toys) -> None:
    store = Store.create(tmp_path / "store", toys.base, Average(), keep=keep)
    for expert in toys.experts:
        store.add(expert)
    assert steps(store) == list(range(max(1, 4 - keep), 5))
    for _ in range(keep):
        store.undo()
        store.verify()
    if keep == 3:
        assert store.undo().name == "expert-1", "the empty store needs no state"
    else:
        with pytest.raises(MergestreamError, match="used up"):
            store.undo()
    store.verify()


def test_undone_experts_can_come_again(store: Store, toys: Toys) -> None:
    bytes_before = files(store.path / "steps" / "0002", ".safetensors")
    store.undo()
    store.add(toys.experts[1])
    assert files(store.path / "steps" / "0002", ".safetensors") == bytes_before


# --- one writer, many readers ------------------------------------------------------------------------------


def test_a_second_writer_is_turned_away(store: Store, toys: Toys) -> None:
    with open_storage(store.path).writing("manifest.json"):
        for write in (lambda: store.add(toys.experts[2]), store.undo, lambda: store.relocate(toys.base)):
            with pytest.raises(StoreBusyError, match=rf"is being written to by process {os.getpid()}; wait"):
                write()
        store.verify()
    store.add(toys.experts[2])


def test_a_second_process_exits_with_3_and_says_who_is_writing(store: Store, toys: Toys) -> None:
    with open_storage(store.path).writing("manifest.json"):
        command: list[str | Path] = [sys.executable, "-m", "mergestream", "undo", store.path]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 3
    assert result.stderr.startswith("error: ") and f"process {os.getpid()}" in result.stderr


@pytest.mark.parametrize("method", [OPCM(), Ledger()], ids=str)
def test_readers_are_unharmed_while_a_writer_adds_and_undoes(tmp_path: Path, toys: Toys, method: Any) -> None:
    """Every export is the model of one of the steps that were committed, whatever happens meanwhile."""
    models: dict[int, list[dict[str, bytes]]] = {}
    writer = Store.create(tmp_path / "store", toys.base, method)
    writer.add(toys.experts[0])
    for number, expert in ((1, None), (2, toys.experts[1]), (2, toys.experts[2])):
        if expert:
            writer.add(expert)
        writer.export(tmp_path / "model", overwrite=True)
        models.setdefault(number, []).append(files(tmp_path / "model", ".safetensors"))
        if expert:
            writer.undo()
    stop = threading.Event()

    def write() -> None:
        turn = 0
        while not stop.is_set():
            writer.add(toys.experts[1 + turn % 2])
            writer.undo()
            turn += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for turn in range(12):
            reader = Store(writer.path, engine=LocalEngine(workers=1))
            reader.export(tmp_path / "model", overwrite=True)
            exported = files(tmp_path / "model", ".safetensors")
            assert exported in models[reader.manifest.step], turn
            reader.verify()
    finally:
        stop.set()
        thread.join()
    writer.verify()


def model_of(tmp_path: Path, toys: Toys, *experts: Path) -> dict[str, bytes]:
    """What comes out of a store of its own."""
    fresh = Store.create(tmp_path / f"fresh-{len(list(tmp_path.iterdir()))}", toys.base, OPCM())
    for expert in experts:
        fresh.add(expert)
    return files(fresh.export(tmp_path / "fresh-model", overwrite=True), ".safetensors")


def test_a_reader_notices_that_its_step_was_taken_back_and_another_written(
    store: Store, toys: Toys, tmp_path: Path
) -> None:
    first, _, third, _ = toys.experts
    reader = Store(store.path)
    store.undo()
    store.add(third)
    exported = files(reader.export(tmp_path / "model"), ".safetensors")
    assert exported == model_of(tmp_path, toys, first, third)


def test_a_reader_does_not_take_a_step_in_the_making_for_its_own(
    store: Store, toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, third, _ = toys.experts
    reader = Store(store.path)
    store.undo()
    original, left = Step.absorb, 4

    def killed(self: Step, *arguments: Any) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return original(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Step, "absorb", killed)
        store.add(third)
    assert (store.path / "steps" / "0002" / "model.safetensors").is_file()
    exported = files(reader.export(tmp_path / "model"), ".safetensors")
    assert exported == model_of(tmp_path, toys, first)


# --- damage ------------------------------------------------------------------------------------------------


def flip(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def test_verify_finds_one_flipped_bit_in_every_file(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", toy_base() | {"head.weight": torch.ones(2, 3)})
    expert = save_model(tmp_path / "expert", toy_expert(1) | {"head.weight": torch.zeros(2, 3)})
    store = Store.create(tmp_path / "store", base, heads=["head.*"], engine=LocalEngine(workers=1))
    store.add(expert)
    generator = torch.Generator().manual_seed(0)
    names, found = set(), 0
    for path in [*sorted(store.path.rglob("*")), base / "model.safetensors"]:
        if not path.is_file() or path.name == "lock":
            continue
        names.add(path.name)
        whole, meant = path.read_bytes(), meaning(path)
        header = 8 + int.from_bytes(whole[:8], "little") if path.suffix == ".safetensors" else len(whole)
        anywhere = torch.randint(len(whole), (8,), generator=generator).tolist()
        for position in [*anywhere, *torch.randint(header, (8,), generator=generator).tolist()]:
            flip(path, position, position % 8)
            if meaning(path) != meant:
                found += 1
                with pytest.raises(MergestreamError):
                    Store(store.path).verify()
            path.write_bytes(whole)
    assert found > 60
    assert {"manifest.json", "model.safetensors", "digests.json", "tensors.json", "heads.safetensors"} <= names
    store.verify()


@pytest.mark.parametrize(
    "lost", ["steps/0002", "steps/0002/digests.json", "experts/0001", "steps/0002/model.safetensors"]
)
def test_verify_finds_what_is_missing(lost: str, store: Store) -> None:
    path = store.path / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(MergestreamError, match=Path(lost).parts[0]):
        Store(store.path).verify()


def test_an_edited_manifest_is_refused(store: Store) -> None:
    path = store.path / "manifest.json"
    path.write_text(path.read_text().replace('"alpha": 0.5', '"alpha": 0.4'))
    with pytest.raises(MergestreamError, match="edited"):
        Store(store.path)


def test_a_newer_format_is_refused(store: Store) -> None:
    path = store.path / "manifest.json"
    path.write_text(path.read_text().replace('"format": 3', '"format": 4'))
    with pytest.raises(MergestreamError, match="upgrade"):
        Store(store.path)


# --- the base ----------------------------------------------------------------------------------------------


def test_a_base_that_moved_is_found_again(tmp_path: Path, toys: Toys) -> None:
    old = shutil.copytree(toys.base, tmp_path / "old")
    store = Store.create(tmp_path / "store", old)
    store.add(toys.experts[0])
    new = old.rename(tmp_path / "new")
    with pytest.raises(MergestreamError, match="--base"):
        Store(store.path).add(toys.experts[1])
    with pytest.raises(MergestreamError, match="--base"):
        Store(store.path).verify()
    Store(store.path).relocate(new)
    again = Store(store.path)
    assert again.manifest.base.source == str(new)
    again.add(toys.experts[1])
    again.verify()


def test_another_model_is_not_taken_for_the_base(store: Store, toys: Toys, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", {"other": torch.ones(2)})
    with pytest.raises(MergestreamError, match="is not the base of this store"):
        store.relocate(other)
    with pytest.raises(MergestreamError, match=r"the base has changed.*tensor double.weight"):
        store.relocate(toys.experts[0])
    assert Store(store.path).manifest.base.source == str(toys.base)


def test_a_base_that_changes_under_the_store_is_noticed(tmp_path: Path, toys: Toys) -> None:
    base = shutil.copytree(toys.base, tmp_path / "base")
    store = Store.create(tmp_path / "store", base, Average())
    store.add(toys.experts[0])
    before = files(store.path, ".safetensors", ".json")
    changed = toy_base()
    changed["layers.0.q.weight"][2, 2] += 1e-6
    save_model(base, changed)
    for use in (
        lambda: store.add(toys.experts[1]),
        lambda: store.inspect(toys.experts[1]),
        lambda: store.export(tmp_path / "model"),
        store.verify,
    ):
        with pytest.raises(MergestreamError, match=r"the base has changed .*: tensor layers.0.q.weight in"):
            use()
    assert files(store.path, ".safetensors", ".json") == before
    assert not (tmp_path / "model").exists()


def test_a_store_wants_a_base_that_can_be_found_again(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="save the base first"):
        Store.create(tmp_path / "store", toy_base())


# --- what may not come in ----------------------------------------------------------------------------------


def unchanged(store: Store, refused: Callable[[], object], match: str) -> None:
    """The step is abandoned, the store is as it was, and the sentence says why."""
    before = files(store.path, ".safetensors", ".json")
    with pytest.raises(MergestreamError, match=match) as caught:
        refused()
    assert "\n" not in str(caught.value)
    assert files(store.path, ".safetensors", ".json") == before
    assert steps(store) == [1, 2]
    store.verify()


def test_duplicates_are_refused_unless_allowed(store: Store, toys: Toys) -> None:
    unchanged(store, lambda: store.add(toys.experts[0]), "absorbed already, as expert-1")
    assert store.add(toys.experts[0], allow_duplicate=True).name == "expert-1-2"


def test_an_expert_identical_to_the_base_is_refused_unless_allowed(store: Store, toys: Toys) -> None:
    unchanged(store, lambda: store.add(toys.base), "identical to the base")
    assert store.add(toys.base, allow_duplicate=True).norm == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_refused_with_file_and_tensor(value: Any, store: Store, tmp_path: Path) -> None:
    tensors = toy_expert(3)
    tensors["layers.0.up.weight"][3, 4] = value
    expert = save_model(tmp_path / "bad", tensors)
    unchanged(
        store, lambda: store.add(expert), r"tensor layers.0.up.weight in model.safetensors of \S*bad holds NaN or Inf"
    )


def test_a_base_with_nan_makes_no_store(tmp_path: Path) -> None:
    tensors = toy_base()
    tensors["layers.0.norm.weight"][0] = float("nan")
    with pytest.raises(MergestreamError, match=r"layers.0.norm.weight in model.safetensors .* holds NaN"):
        Store.create(tmp_path / "store", save_model(tmp_path / "base", tensors))
    assert not (tmp_path / "store").exists()


def test_partial_experts_count_as_unchanged_where_they_lack_tensors(tmp_path: Path, toys: Toys) -> None:
    expert = toy_expert(1)
    adapted = {name: tensor for name, tensor in expert.items() if name.startswith("layers.0.q")}
    store = Store.create(tmp_path / "store", toys.base, Average())
    with pytest.raises(MergestreamError, match=r"lacks 10 tensors \(.*, …\) of the base.*--partial"):
        store.add(save_model(tmp_path / "part", adapted))
    entry = store.add(tmp_path / "part", partial=True)
    assert entry.fates == {"copied": 2, "merged": 1, "unchanged": 10}
    store.export(tmp_path / "model")
    merged, base = load_file(tmp_path / "model" / "model.safetensors"), toy_base()
    for name, tensor in base.items():
        assert torch.equal(merged[name], adapted.get(name, tensor)), name


def test_ignored_tensors_are_left_out(tmp_path: Path, toys: Toys) -> None:
    expert = toy_expert(1) | {"embed_tokens.weight": torch.ones(30, 8), "extra.weight": torch.ones(2)}
    path = save_model(tmp_path / "expert", expert)
    store = Store.create(tmp_path / "store", toys.base, Average())
    with pytest.raises(MergestreamError, match="matches no tensor"):
        store.add(path, ignore=["embed_tokens.*", "extra.*", "nothing.*"])
    entry = store.add(path, ignore=["embed_tokens.*", "extra.*"])
    assert entry.fates == {"copied": 2, "ignored": 2, "merged": 10}
    store.export(tmp_path / "model")
    merged = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(merged["embed_tokens.weight"], toy_base()["embed_tokens.weight"])
    assert merged.keys() == toy_base().keys()


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path: Path, toys: Toys) -> None:
    """A real small file system where we may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount: list[str | Path] = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    try:
        big = {"a.weight": torch.randn(100, 300), "b.weight": torch.randn(200, 300)}
        base = save_model(tmp_path / "base", big)
        experts = [save_model(tmp_path / f"e{n}", toy_expert(n, big)) for n in range(3)]
        store = Store.create(disk / "store", base, Average(), keep=1)
        store.add(experts[0])
        before = files(store.path, ".safetensors", ".json")
        with pytest.raises(MergestreamError, match=r"360\d+ bytes are needed and \d+ are free; free some disk space"):
            store.add(experts[1])
        assert files(store.path, ".safetensors", ".json") == before
        with pytest.raises(MergestreamError, match="are free; free some disk space"):
            store.export(disk / "model")
        assert [path.name for path in disk.iterdir()] == ["store"]
        store.verify()
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        store.add(experts[1])
        store.verify()
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "posix_fallocate", "replace", "mkdir"])
def test_an_error_of_the_disk_is_a_sentence_and_the_store_goes_on(
    call: str, store: Store, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(os, call)
    left = {"pwrite": 3, "fsync": 3, "mkdir": 2}.get(call, 1)  # the first mkdir finds the store, and needs no room

    def full(*arguments: object, **options: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises((MergestreamError, OSError)):
            Store(store.path, engine=LocalEngine(workers=1)).add(toys.experts[2])
    again = Store(store.path)
    again.verify()
    assert again.manifest.step == 2
    again.add(toys.experts[2])
    again.verify()


@pytest.mark.parametrize("call", ["pwrite", "fsync"])  # the note in the lock, the plan of the step
def test_a_disk_that_is_full_from_the_start_is_a_sentence_and_takes_no_room(
    call: str, store: Store, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = files(store.path, ".safetensors", ".json")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(MergestreamError, match="cannot be written"):
            store.add(toys.experts[2])
    assert files(store.path, ".safetensors", ".json") == before


# --- heads -------------------------------------------------------------------------------------------------


@pytest.fixture
def with_heads(tmp_path: Path) -> Store:
    base = save_model(tmp_path / "base", toy_base() | {"head.weight": torch.zeros(2, 8)})
    store = Store.create(tmp_path / "store", base, heads=["head.*"])
    for number, labels in ((1, 2), (2, 5)):
        expert = toy_expert(number) | {"head.weight": torch.full((labels, 8), float(number))}
        store.add(save_model(tmp_path / f"task-{number}", expert))
    return store


def test_heads_stay_with_their_expert(with_heads: Store, tmp_path: Path) -> None:
    store = with_heads
    assert store.history[0].fates["head"] == 1
    store.export(tmp_path / "plain")
    assert torch.equal(load_file(tmp_path / "plain" / "model.safetensors")["head.weight"], torch.zeros(2, 8))
    backbone = {n: t for n, t in load_file(tmp_path / "plain" / "model.safetensors").items() if n != "head.weight"}
    for number, labels in ((1, 2), (2, 5)):
        out = store.export(tmp_path / f"model-{number}", task=f"task-{number}")
        merged = load_file(out / "model.safetensors")
        assert torch.equal(merged.pop("head.weight"), torch.full((labels, 8), float(number)))
        assert all(torch.equal(tensor, backbone[name]) for name, tensor in merged.items())
    with pytest.raises(MergestreamError, match=r"no expert named other .*task-1, task-2"):
        store.export(tmp_path / "model-3", task="other")


def test_a_head_does_not_change_the_merge(with_heads: Store, tmp_path: Path, toys: Toys) -> None:
    plain = Store.create(tmp_path / "plain-store", toys.base)
    plain.add(toys.experts[0])
    assert with_heads.history[0].norm == plain.history[0].norm


def test_an_expert_without_a_head_has_none_to_export(with_heads: Store, tmp_path: Path) -> None:
    with_heads.add(save_model(tmp_path / "bare", toy_expert(3)))
    with pytest.raises(MergestreamError, match="expert bare has no head of its own"):
        with_heads.export(tmp_path / "model", task="bare")


# --- memory ------------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_says_which_tensor_and_what_to_do(store: Store, toys: Toys) -> None:
    small = Store(store.path, engine=LocalEngine(workers=2, max_memory=100))
    unchanged(store, lambda: small.add(toys.experts[2]), r"tensor \S+ needs [\d.]+ kB of memory, .*--max-memory")


def test_a_budget_changes_nothing_but_the_memory(store: Store, toys: Toys, tmp_path: Path) -> None:
    copy = shutil.copytree(store.path, tmp_path / "copy")
    enough_for_one = Store(store.path, engine=LocalEngine(workers=1)).inspect(toys.experts[2]).memory
    with pytest.raises(MergestreamError, match="--max-memory"):
        Store(copy, engine=LocalEngine(workers=4, max_memory=enough_for_one - 1)).add(toys.experts[2])
    Store(copy, engine=LocalEngine(workers=4, max_memory=enough_for_one)).add(toys.experts[2])
    store.add(toys.experts[2])
    assert files(copy / "steps") == files(store.path / "steps")


# --- inspection --------------------------------------------------------------------------------------------


def test_inspection_tells_what_adding_then_does(store: Store, toys: Toys) -> None:
    before = files(store.path)
    told = store.inspect(toys.experts[2])
    assert files(store.path) == before
    entry = store.add(toys.experts[2])
    assert (told.norm, told.kept, told.lambda_, told.distance) == (
        entry.norm,
        entry.kept,
        entry.lambda_,
        entry.distance,
    )
    assert told.step == 3 and told.fates == entry.fates and told.duplicate_of is None
    assert sum(path.stat().st_size for path in (store.path / "steps" / "0003").glob("*.safetensors")) >= told.disk
    records = tensor_records(store.storage, entry, list(told.tensors))
    for name, tensor in told.tensors.items():
        assert (tensor.norm, tensor.kept, tensor.protected) == (
            records[name]["norm"],
            records[name]["kept"],
            records[name]["protected"],
        )
    assert store.inspect(toys.experts[2]).duplicate_of == "expert-3"


def test_names_are_free_but_unique(store: Store, toys: Toys) -> None:
    assert store.add(toys.experts[2], "legal").name == "legal"
    with pytest.raises(MergestreamError, match="an expert named legal has been absorbed already"):
        store.add(toys.experts[3], "legal")


def test_a_store_is_not_made_over_something_else(tmp_path: Path, toys: Toys) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place in ("full", "file"):
        with pytest.raises(MergestreamError, match="choose another place"):
            Store.create(tmp_path / place, toys.base)
    with pytest.raises(UsageError, match="keep=-1"):
        Store.create(tmp_path / "new", toys.base, keep=-1)


def test_an_at_sign_in_a_path_is_no_revision(tmp_path: Path, toys: Toys) -> None:
    place = save_model(tmp_path / "weeks@2026" / "legal@v2", toy_expert(1))
    store = Store.create(tmp_path / "store", toys.base)
    assert store.add(place).name == "legal@v2"


def test_a_new_store_outlives_a_power_cut(tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of its directory is flushed, too."""
    flushed = []
    monkeypatch.setattr("mergestream.files.sync_directory", lambda path: flushed.append(path.resolve()))
    Store.create(tmp_path / "a" / "store", toys.base)
    assert {tmp_path, tmp_path / "a"} <= set(flushed)


@pytest.mark.parametrize(("times", "notes"), [(4, 0), (6, 1)])
def test_an_expert_five_times_as_long_as_the_others_is_noted(tmp_path: Path, times: int, notes: int) -> None:
    base = {"a.weight": torch.zeros(4, 4)}
    store = Store.create(tmp_path / "store", save_model(tmp_path / "base", base), Average())
    for number, length in enumerate((1, times)):
        model = {"a.weight": length * torch.eye(4).roll(number, 0)}
        added = store.add(save_model(tmp_path / f"{number}", model), allow_other_base=True)
    assert len([note for note in added.notes if "outweighs" in note]) == notes


def test_the_only_weight_of_a_model_stays_in_factors(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", {"q.weight": torch.randn(16, 12)})
    store = Store.create(tmp_path / "store", base, OPCM())
    for seed in (1, 2):
        store.add(handmade_adapter(tmp_path / f"{seed}", seed, modules={"q": (16, 12)}))
    with store.snapshot() as snapshot:
        assert snapshot.state.ranks("q.weight") == [(2, 2)]
