"""Reading .safetensors: what the safetensors package wrote, as views, and a sentence for every fault."""

import json
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if dtype.is_floating_point:
        return torch.linspace(-3, 3, max(count, 1))[:count].reshape(shape).to(dtype)
    return (torch.arange(count) % 2).to(dtype).reshape(shape)


def raw(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("name", DTYPES)
def test_reads_what_the_safetensors_package_wrote(tmp_path: Path, name: str) -> None:
    dtype = DTYPES[name]
    tensors = {"a": sample(dtype, 5, 3), "scalar": sample(dtype), "empty": sample(dtype, 0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors)
        for key, expected in tensors.items():
            info, tensor = checkpoint.tensors[key], checkpoint.read(key)
            assert (info.dtype, info.shape, info.file) == (name, tuple(expected.shape), "model.safetensors")
            assert (info.numel, info.nbytes) == (expected.numel(), expected.nbytes)
            assert info.is_float == dtype.is_floating_point
            assert tensor.dtype == dtype and torch.equal(tensor, expected)


def test_a_file_tells_where_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2)}, path)
    alone, within = open_checkpoint(str(path)), open_checkpoint(tmp_path)
    assert (alone.source, alone.directory, dict(alone.aliases)) == (str(path), None, {})
    assert (within.source, within.directory) == (str(tmp_path), tmp_path)


def test_fingerprint_follows_the_file_and_not_its_place(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2)}, path)
    before = open_checkpoint(path).fingerprint
    assert before is not None and before == open_checkpoint(tmp_path).fingerprint
    os.utime(path, ns=(1, 1))
    assert open_checkpoint(path).fingerprint != before


def test_tensors_outlive_the_checkpoint_and_never_write_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2000)}, path)
    checkpoint = open_checkpoint(path)
    tensor = checkpoint.read("a")
    checkpoint.close()
    tensor.add_(1)
    assert tensor.sum() == 4000 and open_checkpoint(path).read("a").sum() == 2000


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.5])
    header = {"byte": entry("U8", (1,), (0, 1)), "a": entry("F32", (2,), (1, 9))}
    path = raw(tmp_path / "x.safetensors", header, b"\x07" + values.numpy().tobytes())
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.read("a"), values) and checkpoint.read("byte").item() == 7


def test_a_cache_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert open_checkpoint(snapshot).read("a").sum() == 2
    assert open_checkpoint(snapshot / "model.safetensors").read("a").sum() == 2


FAULTS = {
    "no JSON": (b"{oops", "corrupt header"),
    "no UTF-8": (b'{"\xff": 1}', "corrupt header"),
    "half a surrogate": (b'{"\\ud800": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "corrupt header"),
    "too deep": (b"[" * 100_000, "corrupt header"),
    "a list": (b"[]", "corrupt header .not a JSON object"),
    "a number": (b"1", "corrupt header|not a JSON object"),
    "the same name twice": (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        "corrupt header .duplicate key",
    ),
    "entry is no object": ({"a": 3}, "'a'.*corrupt header entry"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "'a'.*corrupt header entry"),
    "negative dimension": ({"a": entry(shape=(-2,))}, "'a'.*corrupt header entry"),
    "boolean dimension": ({"a": entry(shape=(True, 2))}, "'a'.*corrupt header entry"),
    "three offsets": ({"a": entry(offsets=(0, 4, 8))}, "'a'.*corrupt header entry"),
    "huge empty shape": ({"a": entry(shape=(0, 2**62, 2**62), offsets=(0, 0))}, "'a'.*corrupt header entry"),
    "huge shape": ({"a": entry(shape=[2**62] * 1000)}, "'a'.*corrupt header entry"),
    "too many dimensions": ({"a": entry(shape=[1] * 65 + [2])}, "'a'.*corrupt header entry"),
    "numbers beyond reason": (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', "corrupt"),
    "shape against offsets": ({"a": entry(shape=(3,))}, "'a'.*takes 12 bytes.*span 8"),
    "end before begin": ({"a": entry(offsets=(8, 0))}, "'a'.*span -8"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, "'b' overlaps the tensor before it"),
    "gap": ({"a": entry(offsets=(4, 12))}, "'a' leaves a gap"),
    "unknown dtype": ({"a": entry("C64", (1,))}, "'a'.*C64; save it as"),
    "float8": ({"a": entry("F8_E4M3", (8,))}, "'a'.*quantised.*dequantise"),
    "metadata": ({"__metadata__": {"format": 3}, "a": entry()}, "corrupt header .Expected `str`"),
    "no tensors": ({}, "bytes too many"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_header_is_refused(tmp_path: Path, fault: str) -> None:
    header, message = FAULTS[fault]
    path = raw(tmp_path / "x.safetensors", header, bytes(8))
    with pytest.raises(MergestreamError, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MergestreamError, match="holds no tensors"):
        open_checkpoint(raw(tmp_path / "x.safetensors", {}))


def test_a_truncated_file_tells_how_much_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(8)}, path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(MergestreamError, match="truncated: 5 bytes are missing at its end"):
        open_checkpoint(path)


def test_trailing_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4)}, path)
    path.write_bytes(path.read_bytes() + b"abc")
    with pytest.raises(MergestreamError, match="3 bytes too many"):
        open_checkpoint(path)


def test_truncation_anywhere_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4, 4), "b": torch.ones(8).half()}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(MergestreamError):
            open_checkpoint(path)


def test_random_damage_to_the_header_is_a_sentence_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4, 4), "b": torch.ones(8).half(), "c": torch.tensor(3)}, path)
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    rng = random.Random(0)
    refused = 0
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(path)
        except MergestreamError:
            refused += 1
            continue
        for name, info in checkpoint.tensors.items():  # a renamed tensor, say; still of the announced shape
            assert tuple(checkpoint.read(name).shape) == info.shape
    assert 500 < refused < 1000


def test_a_file_that_shrinks_while_it_is_open_does_not_crash(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(100_000)}, path)
    checkpoint = open_checkpoint(path)
    os.truncate(path, 1000)
    with pytest.raises(MergestreamError, match="'a'"):
        checkpoint.read("a")


def test_other_files_are_no_checkpoints(tmp_path: Path) -> None:
    for name, content, message in [
        ("x.safetensors", b"", "only 0 bytes"),
        ("x.safetensors", b"<html>not found</html>" * 10, "no safetensors file"),
        (
            "x.safetensors",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "git lfs pull",
        ),
        ("x.txt", b"hello", "no checkpoint"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(MergestreamError, match=message) as error:
            open_checkpoint(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)
    with pytest.raises(MergestreamError, match="does not exist"):
        open_checkpoint(tmp_path / "absent.safetensors")
    for unusable in ("x" * 5000, "~no-such-user/x", "x\0y", ""):
        with pytest.raises(MergestreamError):
            open_checkpoint(unusable)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(MergestreamError, match="no regular file"):
        open_checkpoint(tmp_path / "pipe.safetensors")


def test_of_many_names_one_twice_is_found_soon(tmp_path: Path) -> None:
    entry = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    names = [*range(60_000), 59_999]
    header = "{" + ",".join(f'"t{name}":{entry}' for name in names) + "}"
    with pytest.raises(MergestreamError, match=r"corrupt header .duplicate key"):
        open_checkpoint(raw(tmp_path / "a.safetensors", header.encode()))
