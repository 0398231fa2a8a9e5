"""Exports appear whole or not at all, never with stale files, and are rounded once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mergestream.export.model
import mergestream.files
from mergestream import OPCM, Average, MergestreamError, Store
from mergestream.errors import StoreBusyError, UsageError
from mergestream.export.directory import Output
from mergestream.storage import local
from tests.conftest import RunCommand, Toys, files, save_model, toy_base, toy_expert


@pytest.fixture
def store(tmp_path: Path, toys: Toys) -> Store:
    store = Store.create(tmp_path / "store", toys.base, Average())
    store.add(toys.experts[0])
    return store


def test_the_first_expert_of_an_average_comes_out_as_it_came_in(store: Store, tmp_path: Path) -> None:
    merged = load_file(store.export(tmp_path / "merged") / "model.safetensors")
    for name, tensor in toy_expert(1).items():
        assert merged[name].dtype == tensor.dtype
        rounding = 2**-8 if tensor.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(merged[name], tensor, rtol=rounding, atol=1e-7)


def test_shards_hold_at_most_what_they_may_and_the_index_says_where(store: Store, tmp_path: Path) -> None:
    out = store.export(tmp_path / "merged", max_shard_size=800)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
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
def test_floats_get_the_dtype_asked_for_and_integers_keep_theirs(dtype: str, store: Store, tmp_path: Path) -> None:
    merged = load_file(store.export(tmp_path / "merged", dtype=dtype) / "model.safetensors")
    for name, tensor in toy_base().items():
        assert merged[name].dtype == (getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype)


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", toy_base() | {"layers.0.q.weight": torch.full((8, 8), 1e5)})
    store = Store.create(tmp_path / "store", base, Average())
    store.add(save_model(tmp_path / "expert", toy_expert(1) | {"layers.0.q.weight": torch.full((8, 8), 1.1e5)}))
    with pytest.raises(MergestreamError, match=r"layers.0.q.weight has values that float16 cannot hold.*bfloat16"):
        store.export(tmp_path / "merged", dtype="float16")
    assert not (tmp_path / "merged").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "expert", "store"], "no draft is left"


def test_the_directory_is_readable_like_any_other(store: Store, tmp_path: Path) -> None:
    out = store.export(tmp_path / "merged")
    (tmp_path / "plain").mkdir()
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) & 0o444 == 0o444


def test_parents_are_made(store: Store, tmp_path: Path) -> None:
    assert (store.export(tmp_path / "a" / "b" / "merged") / "model.safetensors").is_file()


def test_a_draft_becomes_the_output_only_when_all_went_well(tmp_path: Path) -> None:
    output = Output(tmp_path / "model")
    with pytest.raises(RuntimeError), output.draft() as draft:
        (draft / "half").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with output.draft() as draft:
        (draft / "all").touch()
        assert not output.path.exists()
    assert contents(tmp_path) == {"model/all": b""}


def contents(place: Path) -> dict[str, bytes]:
    """All files but for what marks an export."""
    return {name: data for name, data in files(place).items() if not name.endswith("mergestream.json")}


def write(path: Path, name: str, **options: Any) -> None:
    """An export that consists of one file, and the marker."""
    with Output(path, **options).draft() as draft:
        (draft / name).touch()
        (draft / "mergestream.json").write_text('{"mergestream": "", "command": null}')


def test_overwriting_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    write(tmp_path / "model", "old")
    with pytest.raises(MergestreamError, match="--overwrite"):
        Output(tmp_path / "model")
    with pytest.raises(RuntimeError), Output(tmp_path / "model", overwrite=True).draft():
        raise RuntimeError
    assert contents(tmp_path) == {"model/old": b""}
    write(tmp_path / "model", "new", overwrite=True)
    assert contents(tmp_path) == {"model/new": b""}


def in_a_child(work: Callable[[], object]) -> int:
    """Fork, work, and say how it ended."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("atomic", [True, False])
def test_a_kill_at_any_rename_keeps_the_old_export_or_leaves_the_new_one(
    atomic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not atomic:
        monkeypatch.setattr(mergestream.files, "_exchange_at_once", lambda one, other: False)
    path, seen, original = tmp_path / "model", [], Path.rename
    for number in range(1, 5):

        def replace(number: int = number) -> None:
            left = number

            def rename(*paths: Path) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os._exit(9)
                original(*paths)

            Path.rename = rename  # type: ignore[method-assign, assignment]  # in the child alone
            write(path, "new", overwrite=True)

        write(path, "old", overwrite=True)
        code = in_a_child(replace)
        if not path.exists():
            with pytest.raises(MergestreamError, match="exists already; pass --overwrite"):
                write(path, "other")
            seen.append("put back")
        assert contents(path) in ({"old": b""}, {"new": b""})
        seen.append(*contents(path))
        write(path, "newer", overwrite=True)
        assert [found.name for found in tmp_path.iterdir()] == ["model"], "nothing is left over"
        if code == 0:
            break
        assert code == 9
    assert seen == (["new"] if atomic else ["old", "put back", "old", "new"])


def test_what_a_killed_export_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    def killed() -> None:
        with Output(tmp_path / "model").draft() as draft:
            (draft / "half").touch()
            os._exit(9)

    assert in_a_child(killed) == 9
    assert [path.name for path in tmp_path.iterdir()] == [".model.mergestream"]
    write(tmp_path / "model", "all")
    assert contents(tmp_path) == {"model/all": b""}


def test_of_two_exports_to_one_place_the_second_is_refused(
    store: Store, tmp_path: Path, mergestream: RunCommand
) -> None:
    with Output(tmp_path / "model").draft() as draft:
        (draft / "first").touch()
        result = mergestream("export", store.path, tmp_path / "model")
        assert result.code == 3 and result.out == "" and "is being written by another export" in result.err
        write(tmp_path / "other", "second")
    assert contents(tmp_path / "model") == {"first": b""}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other", "store"]


def test_a_lock_whose_file_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder removes it when it is done, and a third one may have made another."""
    original = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        (tmp_path / ".model.mergestream" / "lock").unlink()
        original(descriptor, operation)

    with monkeypatch.context() as patch, pytest.raises(StoreBusyError):
        patch.setattr(fcntl, "flock", flock)
        write(tmp_path / "model", "all")
    write(tmp_path / "model", "all")
    assert contents(tmp_path) == {"model/all": b""}


def test_all_files_are_flushed_before_they_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toys: Toys) -> None:
    base = save_model(tmp_path / "base", toy_base())
    (base / "config.json").write_text("{}")
    store = Store.create(tmp_path / "store", base, OPCM())
    for expert in toys.experts[:2]:
        store.add(expert)
    flushed, original = set(), os.fsync

    def fsync(descriptor: int) -> None:
        if not (tmp_path / "merged").exists():
            flushed.add(os.fstat(descriptor).st_ino)
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    out = store.export(tmp_path / "merged")
    assert {"config.json", "README.md", "mergestream.json"} <= {path.name for path in out.iterdir()}
    assert {path.stat().st_ino for path in (out, *out.iterdir())} <= flushed


@pytest.mark.parametrize("old", [True, False])
def test_a_disk_that_fails_leaves_what_was_there(old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, path = os.fsync, tmp_path / "new" / "model"
    if old:
        write(path, "old")
    before = files(tmp_path)
    for number in range(1, 20):
        left = number

        def fsync(descriptor: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            original(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            try:
                write(path, "new", overwrite=True)
                break
            except MergestreamError as error:
                assert "written: Input/output error" in str(error)
        assert files(tmp_path) == before
        assert [path.name for path in tmp_path.iterdir()] == (["new"] if old else [])
        assert not old or [path.name for path in path.parent.iterdir()] == ["model"]
    assert number > 4 and contents(path) == {"new": b""}


def test_a_full_disk_is_one_error(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mergestream: RunCommand
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "config.json")

    store.export(tmp_path / "merged")
    before = files(tmp_path)
    monkeypatch.setattr("mergestream.export.model.write_companions", full)
    result = mergestream("export", store.path, tmp_path / "merged", "--overwrite")
    sentence = f"error: {tmp_path / 'merged'} was not written: No space left on device (config.json)\n"
    assert (result.code, result.err) == (1, sentence)
    assert files(tmp_path) == before


def test_the_card_is_of_the_step_that_is_exported(tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the last expert is exchanged for another while the weights are being written."""
    store = Store.create(tmp_path / "store", toys.base, OPCM())
    for expert in toys.experts[:2]:
        store.add(expert)
    undisturbed = files(store.export(tmp_path / "undisturbed"))
    original = mergestream.export.model.write_tensors

    def disturbed(*arguments: Any) -> str:
        digest = original(*arguments)
        Store(store.path).undo()
        Store(store.path).add(toys.experts[2])
        return digest

    monkeypatch.setattr(mergestream.export.model, "write_tensors", disturbed)
    assert files(store.export(tmp_path / "disturbed")) == undisturbed


@pytest.mark.parametrize(
    ("called", "dtype"),
    [
        *(("bf16", "bfloat16"), ("BF16", "bfloat16"), ("torch.bfloat16", "bfloat16"), (torch.bfloat16, "bfloat16")),
        *(("fp16", "float16"), ("F16", "float16"), ("fp32", "float32"), ("float64", "float64")),
        *(("fp64", "float64"), ("f64", "float64")),
    ],
)
def test_dtypes_have_aliases(called: Any, dtype: Any, tmp_path: Path) -> None:
    assert Output(tmp_path / "model", dtype=called).dtype == dtype


def test_a_dtype_that_does_not_exist_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="float8"):
        Output(tmp_path / "model", dtype="float8")


def test_companions_that_are_strange_do_not_matter(tmp_path: Path) -> None:
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
    assert written == {"README.md", "config.json", "mergestream.json", "model.safetensors", "source.spm"}
    assert "base_model:" not in (out / "README.md").read_text(), "no hub id is known"


def test_the_config_of_an_expert_with_a_head_is_kept_only_if_it_is_json(tmp_path: Path) -> None:
    def model(name: str, seed: int) -> Path:
        return save_model(tmp_path / name, {**toy_expert(seed), "head.weight": torch.full((2, 3), float(seed))})

    store = Store.create(tmp_path / "store", model("base", 0), Average(), heads=["head.*"])
    expert = model("expert", 1)
    (expert / "config.json").write_text('{"limits": [0, Infinity]}')
    with pytest.raises(MergestreamError, match=r"config\.json is not valid JSON with finite numbers"):
        store.add(expert)
    assert not store.history


def test_an_empty_store_has_nothing_to_export(tmp_path: Path, toys: Toys) -> None:
    with pytest.raises(MergestreamError, match="add an expert first"):
        Store.create(tmp_path / "store", toys.base).export(Path(tmp_path / "merged"))


def test_what_cannot_be_tidied_up_is_no_reason_to_say_that_nothing_was_written(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, calls = local._settle, []

    def fail_afterwards(work: Path, place: Path) -> None:
        calls.append(work)
        if len(calls) > 1:
            raise OSError(errno.EIO, "Input/output error")
        settle(work, place)

    monkeypatch.setattr(local, "_settle", fail_afterwards)
    store.export(tmp_path / "merged")
    assert len(calls) == 2 and (tmp_path / "merged" / "model.safetensors").is_file()
