"""Directories of torch.distributed.checkpoint: read by torch's own reader, and no pickle in them is executed."""

import io
import os
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta

from mergestream import Average, LocalEngine, Store, merge
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError

WEIGHTS = {
    "linear.weight": torch.arange(24.0).reshape(6, 4),
    "linear.bias": torch.randn(6).bfloat16(),
    "steps": torch.tensor(7),
}


class Malicious:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


def save(content: dict[str, Any], directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=directory)
    return directory


def altered(directory: Path, change: Any) -> None:
    """Write the metadata again, changed."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def refused(directory: Path, message: str) -> None:
    with pytest.raises(MergestreamError, match=message) as error:
        open_checkpoint(directory)
    assert "\n" not in str(error.value) and str(directory) in str(error.value)


def optimizer_state() -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize(
    "content",
    [
        WEIGHTS,
        {"model": WEIGHTS, "optimizer": optimizer_state(), "epoch": 3},
        {"app": {"model": WEIGHTS, "optim": optimizer_state()}},
        {**WEIGHTS, "optimizer": optimizer_state(), "train_state": {"step": torch.tensor(1)}},
    ],
    ids=["plain", "model", "app", "beside"],
)
def test_the_model_is_read_whatever_lies_beside_it(tmp_path: Path, content: dict[str, Any]) -> None:
    with open_checkpoint(save(content, tmp_path / "dcp")) as checkpoint:
        assert set(checkpoint.tensors) == set(WEIGHTS)
        for name, tensor in WEIGHTS.items():
            found = checkpoint.read(name)
            assert torch.equal(found, tensor) and found.dtype == tensor.dtype
            assert checkpoint.tensors[name].shape == tuple(tensor.shape)
        assert checkpoint.directory == tmp_path / "dcp" and checkpoint.fingerprint


def test_the_chunks_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    """What two ranks write: each its rows, in a file of its own."""
    directory, whole = save({"model": WEIGHTS}, tmp_path / "dcp"), WEIGHTS["linear.weight"]
    places, chunks = {}, []
    for rank, rows in enumerate((whole[:4], whole[4:])):
        file = io.BytesIO()
        torch.save(rows.clone(), file)
        offset = torch.Size((4 * rank, 0))
        (directory / f"__{rank}_1.distcp").write_bytes(b"what is before" + file.getvalue())
        chunks.append(ChunkStorageMetadata(offset, rows.size()))
        places[offset] = f"__{rank}_1.distcp", len(b"what is before"), len(file.getvalue())

    def split(metadata: Any) -> None:
        key = "model.linear.weight"
        metadata.state_dict_metadata[key].chunks = chunks
        info = metadata.storage_data.pop(MetadataIndex(key, (0, 0)))
        for offset, place in places.items():
            metadata.storage_data[MetadataIndex(key, offset)] = type(info)(*place)
        metadata.storage_meta = StorageMeta(checkpoint_id=Path("/where/it/was/saved"))

    altered(directory, split)
    assert torch.equal(open_checkpoint(directory).read("linear.weight"), whole)
    (directory / "__1_1.distcp").unlink()
    refused(directory, "lacks a part of the tensor 'linear.weight'; download or copy it again")


def test_accelerates_directory_above_it_is_the_models(tmp_path: Path) -> None:
    save({"model": WEIGHTS}, tmp_path / "pytorch_model_fsdp_0")
    save({"optimizer": optimizer_state()}, tmp_path / "optimizer_0")
    (tmp_path / "config.json").write_text("{}")
    assert set(open_checkpoint(tmp_path).tensors) == set(WEIGHTS) and open_checkpoint(tmp_path).directory == tmp_path
    refused(tmp_path / "optimizer_0", "holds no tensors of a model")


def test_a_malicious_pickle_in_the_metadata_is_not_executed(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    for place in ("planner_data", "storage_meta"):
        directory = save({"model": WEIGHTS}, tmp_path / place)
        altered(directory, lambda metadata, place=place: setattr(metadata, place, Malicious(proof)))
        refused(directory, r"asks for more than metadata \(posix.mkdir\): it was not executed")
    (directory / ".metadata").write_bytes(pickle.dumps(Malicious(proof)))
    refused(directory, "not executed")
    (directory / ".metadata").write_bytes(pickle.dumps(torch.nn.Linear))
    refused(directory, "torch.nn.modules.linear.Linear")
    assert not proof.exists()


def test_a_malicious_pickle_in_a_chunk_is_not_executed(tmp_path: Path) -> None:
    directory, proof = save({"model": WEIGHTS}, tmp_path / "dcp"), tmp_path / "proof"
    torch.save(Malicious(proof), directory / "__0_0.distcp")
    size = (directory / "__0_0.distcp").stat().st_size

    def lead_there(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, size

    altered(directory, lead_there)
    with (
        open_checkpoint(directory) as checkpoint,
        pytest.raises(MergestreamError, match="no pickle was executed"),
    ):
        checkpoint.read("linear.weight")
    assert not proof.exists()


def lead_outside(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../secret"


def make_huge(metadata: Any) -> None:
    described = metadata.state_dict_metadata["linear.weight"]
    described.size = described.chunks[0].sizes = torch.Size((2**30, 2**20))


def leave_a_gap(metadata: Any) -> None:
    metadata.state_dict_metadata["linear.weight"].size = torch.Size((8, 4))


def cut(metadata: Any, *boxes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Say that the weight consists of these chunks (offsets and sizes), each of them all of what was written."""
    place = metadata.storage_data.pop(MetadataIndex("linear.weight", (0, 0)))
    described = metadata.state_dict_metadata["linear.weight"]
    described.chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    metadata.storage_data |= {MetadataIndex("linear.weight", torch.Size(offsets)): place for offsets, _ in boxes}


def overlap(metadata: Any) -> None:
    cut(metadata, ((0, 0), (4, 4)), ((2, 0), (2, 4)))  # 24 elements, and the last two rows are in none


def overlap_in_columns(metadata: Any) -> None:
    cut(metadata, ((0, 0), (3, 2)), ((0, 1), (3, 2)), ((3, 0), (3, 4)))


def overlap_at_one_place(metadata: Any) -> None:
    cut(metadata, ((0, 0), (6, 4)), ((0, 0), (6, 2)))


def compress(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ("zstd",)


def put_nonsense(metadata: Any) -> None:
    metadata.state_dict_metadata["linear.weight"].size = "large"


@pytest.mark.parametrize(
    "change",
    [
        *(lead_outside, make_huge, leave_a_gap, overlap, overlap_in_columns, overlap_at_one_place),
        *(compress, put_nonsense),
    ],
)
def test_what_the_metadata_says_is_checked(tmp_path: Path, change: Any) -> None:
    directory = save(WEIGHTS, tmp_path / "dcp")
    (tmp_path / "secret").write_bytes((directory / "__0_0.distcp").read_bytes())
    altered(directory, change)
    refused(directory, r"\.metadata lacks a part of the tensor")


@pytest.mark.parametrize("shape", [(12, 10), (6, 5, 4)])
def test_any_tiling_by_chunks_is_read_and_any_hole_is_found(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Boxes that are cut at random, and the same with one of them moved by an element."""
    dice, whole = random.Random(0), torch.randn(shape)
    boxes = [(list[int]([0] * len(shape)), list(shape))]
    while len(boxes) < 9:
        offsets, sizes = boxes.pop(dice.randrange(len(boxes)))
        axis = dice.choice([axis for axis, size in enumerate(sizes) if size > 1] or [0])
        at = dice.randrange(sizes[axis])
        for begin, size in ((0, at), (at, sizes[axis] - at)):
            part = [list(offsets), list(sizes)]
            part[0][axis] += begin
            part[1][axis] = size
            boxes += [(part[0], part[1])] if size else []
    directory = save({"w": whole}, tmp_path / "dcp")
    key, data = MetadataIndex("w", torch.Size([0] * len(shape))), b""

    def put(metadata: Any) -> None:
        nonlocal data
        info = metadata.storage_data.pop(key)
        chunks = metadata.state_dict_metadata["w"].chunks = []
        for offsets, sizes in boxes:
            file = io.BytesIO()
            torch.save(whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone(), file)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            place = type(info)(info.relative_path, len(data), len(file.getvalue()))
            metadata.storage_data[MetadataIndex("w", torch.Size(offsets))] = place
            data += file.getvalue()

    altered(directory, put)
    (directory / "__0_0.distcp").write_bytes(data)
    assert torch.equal(open_checkpoint(directory).read("w"), whole)

    def move(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["w"].chunks
        number, axis = next(
            (number, axis)
            for number, chunk in enumerate(chunks)
            for axis in range(len(shape))
            if chunk.offsets[axis]
            and [*chunk.offsets[:axis], 0, *chunk.offsets[axis + 1 :]] not in [list(other.offsets) for other in chunks]
        )
        chunk, moved = chunks[number], list(chunks[number].offsets)
        moved[axis] = 0
        place = metadata.storage_data.pop(MetadataIndex("w", chunk.offsets))
        chunks[number] = ChunkStorageMetadata(torch.Size(moved), chunk.sizes)
        metadata.storage_data[MetadataIndex("w", torch.Size(moved))] = place

    altered(directory, move)
    refused(directory, "lacks a part of the tensor 'w'")


def test_a_directory_without_its_metadata_was_not_saved_to_the_end(tmp_path: Path) -> None:
    directory = save(WEIGHTS, tmp_path / "dcp")
    (directory / ".metadata").unlink()
    refused(directory, r"holds \.distcp files; give the directory that has \.metadata")


def test_damage_to_the_metadata_is_a_sentence_or_harmless(tmp_path: Path) -> None:
    directory = save(WEIGHTS, tmp_path / "dcp")
    whole, rng = (directory / ".metadata").read_bytes(), random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole[: rng.choice((len(whole), rng.randrange(1, len(whole))))])
        for _ in range(rng.randint(0, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (directory / ".metadata").write_bytes(damaged)
        try:
            with open_checkpoint(directory) as checkpoint:
                for name, info in checkpoint.tensors.items():
                    assert tuple(checkpoint.read(name).shape) == info.shape
        except MergestreamError:
            pass


def test_what_is_put_together_counts_as_memory(tmp_path: Path) -> None:
    weights = {"w.weight": torch.randn(64, 64)}
    save({"model": weights}, tmp_path / "base")
    save({"model": {"w.weight": weights["w.weight"] * 1.01}}, tmp_path / "expert")
    needed = 4 * 64 * 64 * 4  # two of the base, two of the expert
    with pytest.raises(MergestreamError, match=r"w\.weight needs .* raise --max-memory"):
        merge(
            tmp_path / "base", [tmp_path / "expert"], tmp_path / "out", Average(), engine=LocalEngine(max_memory=needed)
        )
    store = Store.create(tmp_path / "store", base=tmp_path / "base", method=Average())
    store.add(tmp_path / "expert")
    with open_checkpoint(store.export(tmp_path / "out")) as merged:
        torch.testing.assert_close(merged.read("w.weight"), weights["w.weight"] * 1.01)
