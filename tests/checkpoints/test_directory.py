"""Hugging Face directories: which file leads to the weights, and an index that may not lead elsewhere."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergestream.checkpoints import open_checkpoint
from mergestream.checkpoints.layout import companions
from mergestream.errors import MergestreamError

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_index(directory: Path, weight_map: object, name: str = INDEX) -> None:
    (directory / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for i, shard in enumerate(SHARDS):
        save_file({f"w{i}": torch.full((3,), float(i))}, tmp_path / shard)
    write_index(tmp_path, {f"w{i}": shard for i, shard in enumerate(SHARDS)})
    return tmp_path


def refused(directory: Path, message: str) -> str:
    with pytest.raises(MergestreamError, match=message) as error:
        open_checkpoint(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_shards_are_one_checkpoint(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert {name: info.file for name, info in checkpoint.tensors.items()} == {
        "w0": SHARDS[0],
        "w1": SHARDS[1],
    }
    assert [checkpoint.read(f"w{i}").sum().item() for i in range(2)] == [0, 3]


def test_torch_shards_are_one_checkpoint(tmp_path: Path) -> None:
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for i, name in enumerate(names):
        torch.save({f"w{i}": torch.full((3,), float(i))}, tmp_path / name)
    write_index(tmp_path, {f"w{i}": name for i, name in enumerate(names)}, "pytorch_model.bin.index.json")
    assert open_checkpoint(tmp_path).read("w1").sum() == 3


def test_an_index_of_another_prefix_is_found(sharded: Path) -> None:
    (sharded / INDEX).rename(sharded / "state.safetensors.index.json")
    assert set(open_checkpoint(sharded).tensors) == {"w0", "w1"}


def test_safetensors_are_preferred_to_pickles(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).read("a").sum() == 0
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).read("a").sum() == 2


@pytest.mark.parametrize(
    "target",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/secret.safetensors",
        "..",
        "",
        "config.json",
        "..\\secret.safetensors",
        3,
        None,
    ],
)
def test_an_index_leads_nowhere_but_to_weight_files_beside_it(sharded: Path, target: object) -> None:
    save_file({"w1": torch.ones(3)}, sharded.parent / "secret.safetensors")
    (sharded / "sub").symlink_to(sharded.parent, target_is_directory=True)
    write_index(sharded, {"w0": SHARDS[0], "w1": target})
    assert INDEX in refused(sharded, "'w1'.*no weight file beside it")


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map_is_refused(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    refused(sharded, "no weight_map")


@pytest.mark.parametrize("content", ["{", "[]", "\x00", "[" * 100_000])
def test_an_index_that_is_no_json_object_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    assert INDEX in refused(sharded, "JSON")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    refused(sharded, f"{SHARDS[1]} is missing.*{INDEX}")


def test_a_shard_without_a_promised_tensor_is_named(sharded: Path) -> None:
    write_index(sharded, {"w0": SHARDS[0], "w1": SHARDS[1], "w2": SHARDS[1]})
    refused(sharded, f"{SHARDS[1]} lacks the tensor 'w2', which {INDEX} lists there")


def test_a_tensor_that_the_index_does_not_list_is_named(sharded: Path) -> None:
    save_file({"w1": torch.ones(3), "stray": torch.ones(1)}, sharded / SHARDS[1])
    refused(sharded, f"{SHARDS[1]} holds the tensor 'stray', which {INDEX} does not list there")


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    save_file({"w0": torch.ones(3), "w1": torch.ones(3)}, sharded / SHARDS[1])
    refused(sharded, "'w0'")


def test_shards_without_their_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    refused(sharded, f"{SHARDS[0]}, but no index")
    (sharded / SHARDS[1]).unlink()
    refused(sharded, f"{SHARDS[0]}, but no index")


def test_an_index_and_a_single_file_contradict_each_other(sharded: Path) -> None:
    save_file({"a": torch.ones(1)}, sharded / "model.safetensors")
    refused(sharded, "both model.safetensors and model.safetensors.index.json")


def test_an_index_of_a_single_file_is_fine(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"a": "model.safetensors"})
    assert open_checkpoint(tmp_path).read("a").item() == 1


def test_several_files_without_an_index_are_ambiguous(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"a": torch.ones(1)}, tmp_path / name)
    refused(tmp_path, "2 .safetensors files; name one of them .a.safetensors, b.safetensors")


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "holds no checkpoint")


def test_an_adapter_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, "adapter")


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    assert open_checkpoint(tmp_path).directory == tmp_path
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    refused(tmp_path, "config.json has a quantization_config; dequantise")


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json is not valid JSON")


def test_names_that_are_not_utf_8_are_refused_in_a_sentence(tmp_path: Path) -> None:
    strange = os.fsdecode(b"\xff")
    (tmp_path / strange).mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "plain.safetensors")
    (tmp_path / "plain.safetensors").rename(tmp_path / f"{strange}.safetensors")
    for path in (tmp_path / strange, tmp_path, tmp_path / f"{strange}.safetensors"):
        with pytest.raises(MergestreamError, match="is not valid UTF-8; rename it"):
            open_checkpoint(path)


def test_links_of_companions_may_lead_to_a_hubs_cache_only(tmp_path: Path) -> None:
    model, blobs = tmp_path / "snapshots" / "commit", tmp_path / "blobs"
    for place in (model, blobs):
        place.mkdir(parents=True)
    (blobs / "1").write_text("{}")
    (tmp_path / "secret").write_text("of the user")
    (model / "config.json").symlink_to(blobs / "1")
    assert [path.name for path in companions(model)] == ["config.json"]
    (model / "merges.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(MergestreamError, match=r"merges\.txt is a link that leads out of the model's directory"):
        list(companions(model))
