"""Writing safetensors: what the safetensors package reads back, planned, in place, resumable."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mergestream.checkpoints import SafetensorsWriter, TensorSpec, dtype_name, open_checkpoint, torch_dtype
from mergestream.checkpoints.checkpoint import _DTYPES
from mergestream.digest import tensor_digest
from mergestream.errors import MergestreamError


def layout_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}


def write_all(directory: Path, tensors: dict[str, torch.Tensor], **options: object) -> None:
    with SafetensorsWriter(directory, layout_of(tensors), **options) as writer:  # type: ignore[arg-type]
        for name, tensor in reversed(tensors.items()):
            writer.write(name, tensor)


def equal(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == others.keys() and all(
        torch.equal(t, others[n]) and t.dtype == others[n].dtype for n, t in tensors.items()
    )


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.randn(10, 10) for i in range(5)}


def test_the_safetensors_package_reads_every_dtype(tmp_path: Path) -> None:
    tensors = {}
    for name in _DTYPES:
        dtype = torch_dtype(name)
        tensors[f"{name}.matrix"] = (torch.arange(15).reshape(3, 5) % 2).to(dtype)
        tensors[f"{name}.scalar"] = torch.tensor(1).to(dtype)
        tensors[f"{name}.empty"] = torch.zeros(0, 3).to(dtype)
    tensors["transposed"] = torch.randn(4, 3).T
    tensors["имя"] = torch.randn(2)
    write_all(tmp_path, tensors)
    assert equal(load_file(tmp_path / "model.safetensors"), tensors)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors"]


def test_every_tensor_is_aligned_to_its_element(tmp_path: Path) -> None:
    write_all(
        tmp_path,
        {"flag": torch.ones(3, dtype=torch.bool), "h": torch.ones(3).half(), "d": torch.ones(3).double()},
    )
    checkpoint = open_checkpoint(tmp_path)
    with (tmp_path / "model.safetensors").open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    for name in checkpoint.tensors:
        assert (start + header[name]["data_offsets"][0]) % checkpoint.read(name).element_size() == 0
    assert start % 8 == 0


def test_shards_are_planned_in_the_order_of_the_layout(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_all(tmp_path, tensors, max_shard_size=800)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert list(index["weight_map"].items()) == [(n, shards[i // 2]) for i, n in enumerate(tensors)]
    assert index["metadata"]["total_size"] == 5 * 400
    loaded = {name: t for shard in shards for name, t in load_file(tmp_path / shard).items()}
    assert equal(loaded, tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert equal({name: checkpoint.read(name) for name in checkpoint.tensors}, tensors)


def test_a_tensor_larger_than_a_shard_gets_one_of_its_own(tmp_path: Path) -> None:
    write_all(tmp_path, {"a": torch.ones(1), "big": torch.ones(100), "b": torch.ones(1)}, max_shard_size=40)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_the_same_layout_gives_the_same_bytes(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    for directory in ("a", "b"):
        write_all(tmp_path / directory, tensors, max_shard_size=800, prefix="state")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names[0] == "state-00001-of-00003.safetensors" and "state.safetensors.index.json" in names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_transformers_loads_the_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8)
    model = transformers.GPT2Model(config)
    config.save_pretrained(tmp_path)
    write_all(tmp_path, dict(model.state_dict()), max_shard_size=1000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = transformers.GPT2Model.from_pretrained(tmp_path)
    assert equal(dict(loaded.state_dict()), dict(model.state_dict()))


def test_many_threads_write_at_once(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((1000,), float(i)) for i in range(64)}
    with SafetensorsWriter(tmp_path, layout_of(tensors), max_shard_size=50_000) as writer:

        def write(first: int) -> None:
            for i in range(first, 64, 4):
                writer.write(f"t{i}", tensors[f"t{i}"])

        threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    checkpoint = open_checkpoint(tmp_path)
    assert equal({name: checkpoint.read(name) for name in checkpoint.tensors}, tensors)


def test_a_tensor_can_be_written_in_pieces(tmp_path: Path) -> None:
    tensor = torch.randn(6, 5).bfloat16()
    with SafetensorsWriter(tmp_path, layout_of({"a": tensor})) as writer:
        for start in range(0, 30, 7):
            writer.write_piece("a", start, tensor.reshape(-1)[start : start + 7])
    assert torch.equal(open_checkpoint(tmp_path).read("a"), tensor)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells anonymous memory")
def test_copying_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    def anonymous() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
        return int(line.split()[1]) * 1024

    layout = {f"t{i}": TensorSpec("BF16", (2**22,)) for i in range(8)}
    tensor = torch.ones(2**22).bfloat16()
    with SafetensorsWriter(tmp_path / "a", layout) as writer:
        for name in layout:
            writer.write(name, tensor)
    before, peak = anonymous(), 0
    with open_checkpoint(tmp_path / "a") as source, SafetensorsWriter(tmp_path / "b", source.tensors) as writer:
        for name in source.tensors:
            writer.write(name, source.read(name))
            peak = max(peak, anonymous())
    assert peak - before < 4 * 2**20  # half a tensor


def test_what_the_layout_does_not_say_is_refused(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, {"a": TensorSpec("F32", (2, 3))})
    for wrong in (torch.ones(3, 2), torch.ones(6), torch.ones(2, 3).half()):
        with pytest.raises(ValueError, match="'a' must "):
            writer.write("a", wrong)
    with pytest.raises(ValueError, match="'a' must "):
        writer.write_piece("a", 5, torch.ones(2))
    with pytest.raises(KeyError):
        writer.write("b", torch.ones(1))
    writer.abandon()


def test_close_misses_a_tensor_that_was_never_written(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, {"a": TensorSpec("F32", (2,)), "b": TensorSpec("F32", (2,))}, max_shard_size=8)
    writer.write("a", torch.ones(2))
    with pytest.raises(RuntimeError, match="1 tensors were never written, among them 'b'"):
        writer.close()
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_the_index_appears_only_when_all_is_written(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        SafetensorsWriter(tmp_path, layout_of(tensors), max_shard_size=800),
    ):
        raise KeyboardInterrupt
    with pytest.raises(MergestreamError, match="no index"):
        open_checkpoint(tmp_path)


def test_an_interrupted_writer_is_gone_on_with(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    layout = layout_of(tensors)
    first = SafetensorsWriter(tmp_path, layout, max_shard_size=800, resume=True)
    assert not first.resumed
    done, *rest = tensors
    first.write(done, tensors[done])
    first.abandon()
    with SafetensorsWriter(tmp_path, layout, max_shard_size=800, resume=True) as second:
        digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        assert second.resumed and second.keep(done, digests[done])
        assert not second.keep(rest[0], digests[rest[0]])
        for name in rest:
            second.write(name, tensors[name])
            assert second.keep(name, digests[name])
    checkpoint = open_checkpoint(tmp_path)
    assert equal({name: checkpoint.read(name) for name in checkpoint.tensors}, tensors)


def test_files_of_another_plan_are_not_gone_on_with(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_all(tmp_path, tensors, max_shard_size=800)
    for size in (400, 800):
        with SafetensorsWriter(tmp_path, layout_of(tensors), resume=True, max_shard_size=size) as writer:
            assert not writer.resumed
            for name, tensor in tensors.items():
                writer.write(name, tensor)
        checkpoint = open_checkpoint(tmp_path)  # no stale shard is left beside the new ones
        assert equal({name: checkpoint.read(name) for name in checkpoint.tensors}, tensors)


@pytest.mark.parametrize("damage", ["shorter", "header", "gone", "link"])
def test_damaged_files_are_begun_again(tmp_path: Path, tensors: dict[str, torch.Tensor], damage: str) -> None:
    write_all(tmp_path, tensors, max_shard_size=800)
    victim = tmp_path / "model-00002-of-00003.safetensors"
    if damage == "shorter":
        os.truncate(victim, 500)
    elif damage == "header":
        with victim.open("r+b") as file:
            file.write(b"\0")
    elif damage == "gone":
        victim.unlink()
    else:
        victim.rename(tmp_path / "elsewhere")
        victim.symlink_to("elsewhere")
    with SafetensorsWriter(tmp_path, layout_of(tensors), max_shard_size=800, resume=True) as writer:
        assert not writer.resumed
        for name, tensor in tensors.items():
            writer.write(name, torch.zeros_like(tensor))
    if damage == "link":  # what the link led to is untouched
        assert load_file(tmp_path / "elsewhere")["layer.2.weight"].count_nonzero() == 100


def test_a_new_file_does_not_change_one_that_is_being_read(tmp_path: Path) -> None:
    write_all(tmp_path, {"a": torch.ones(1000)})
    old = open_checkpoint(tmp_path)
    write_all(tmp_path, {"a": torch.zeros(1000)})
    assert old.read("a").sum() == 1000 and open_checkpoint(tmp_path).read("a").sum() == 0


def test_a_disk_that_is_too_small_is_told_before_the_work(tmp_path: Path) -> None:
    layout = {f"t{i}": TensorSpec("F32", (2**38,)) for i in range(4)}
    with pytest.raises(MergestreamError, match=r"needed and \d+ are free"):
        SafetensorsWriter(tmp_path, layout)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SafetensorsWriter(tmp_path, {"a": TensorSpec("F32", (2,))})

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(MergestreamError, match=r"model.safetensors cannot be written: 8 bytes are needed"):
        writer.write("a", torch.ones(2))
    writer.abandon()


def test_a_file_that_may_not_be_that_large_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", too_large)
    with pytest.raises(MergestreamError, match=r"cannot be written: File too large; .*ulimit -f") as caught:
        SafetensorsWriter(tmp_path / "out", {"a": TensorSpec("F32", (2,))})
    assert "free some disk space" not in str(caught.value)


def test_a_disk_that_has_no_room_for_the_index_is_a_sentence(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(
        MergestreamError, match=r"index\.json cannot be written: No space left .*; free some disk space"
    ):
        write_all(tmp_path, tensors, max_shard_size=800)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:7], offset))
    tensors = {"a": torch.randn(33), "b": torch.randn(5).half()}
    write_all(tmp_path, tensors)
    assert equal(load_file(tmp_path / "model.safetensors"), tensors)


def test_a_file_system_without_preallocation_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    write_all(tmp_path, {"a": torch.ones(3)})
    assert open_checkpoint(tmp_path).read("a").sum() == 3


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MergestreamError, match="file/out cannot be written"):
        SafetensorsWriter(tmp_path / "file" / "out", {"a": TensorSpec("F32", (2,))})
