"""A payload in every file in which models keep pickles: no command executes it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.conftest import RunCommand, Toys, save_model, toy_expert
from tests.faults.inputs import ADAPTER, Evil, torch_file, with_pickle

Write = Callable[[Path, Any], Path]


def raw(payload: Any) -> bytes:
    return pickle.dumps({"layers.0.q.weight": payload})


def archived(payload: Any) -> bytes:
    return with_pickle(raw(payload))


def beside_tensors(payload: Any) -> bytes:
    return torch_file({**toy_expert(1), "epoch": payload})


def in_file(name: str, data: Callable[[Any], bytes]) -> Write:
    def write(place: Path, payload: Any) -> Path:
        (place / name).write_bytes(data(payload))
        return place / name

    return write


def in_directory(name: str, data: Callable[[Any], bytes]) -> Write:
    return lambda place, payload: in_file(name, data)(place, payload).parent


def in_adapter(place: Path, payload: Any) -> Path:
    (place / "adapter_config.json").write_text(str(ADAPTER).replace("'", '"'))
    return in_directory("adapter_model.bin", archived)(place, payload)


def in_shard(place: Path, payload: Any) -> Path:
    (place / "pytorch_model.bin.index.json").write_text('{"weight_map": {"layers.0.q.weight": "shard.bin"}}')
    return in_directory("shard.bin", archived)(place, payload)


def saved(place: Path) -> Any:
    """The metadata of a distributed checkpoint, which is to be written again."""
    dcp.save({"model": toy_expert(1)}, checkpoint_id=place)
    return pickle.loads((place / ".metadata").read_bytes())


def in_metadata(place: Path, payload: Any) -> Path:
    metadata = saved(place)
    metadata.planner_data = payload
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    return place


def in_chunk(place: Path, payload: Any) -> Path:
    metadata, file = saved(place), place / "__0_0.distcp"
    file.write_bytes(file.read_bytes() + archived(payload).ljust(1 << 16, b"\0"))
    for key, info in metadata.storage_data.items():
        if isinstance(key, MetadataIndex):
            info.offset, info.length = file.stat().st_size - (1 << 16), 1 << 16
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    return place


REFUSED: dict[str, Write] = {
    **{f"{name}: {data.__name__}": in_directory(name, data)
       for name in ("pytorch_model.bin", "pytorch_model_fsdp.bin") for data in (raw, archived, beside_tensors)},
    **{f"{suffix}: {data.__name__}": in_file(f"model{suffix}", data)
       for suffix in (".bin", ".pt", ".pth", ".ckpt") for data in (raw, archived, beside_tensors)},
    **{name: in_file(name, data)
       for name in ("model.safetensors", "model.pkl", "model.gguf", "model.onnx") for data in (raw,)},
    "optimizer alone": in_file("optimizer.bin", archived),
    "optimizer in a directory": in_directory("optimizer.pt", archived),
    "adapter_model.bin": in_adapter,
    "a shard": in_shard,
    ".metadata": in_metadata,
    "a chunk": in_chunk,
}  # fmt: skip
BESIDE = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "training_args.bin", "rng_state.pth", "1_Dense/weights.bin")


@pytest.fixture
def proof(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "proof"
    assert not (tmp_path / "proof").exists(), "a pickle was executed"


@pytest.fixture
def commands(toys: Toys, tmp_path: Path, done: Callable[..., str]) -> Callable[[Path], list[tuple[object, ...]]]:
    """The commands that open a model; the name of an expert that is in the store is ``known``."""
    store, texts = tmp_path / "store", tmp_path / "texts.txt"
    texts.write_text("one\ntwo\nthree\n")
    done("init", store, "--base", toys.base)
    done("add", store, toys.experts[0], "--name", "known")
    return lambda model: [
        ("init", tmp_path / "new", "--base", model),
        ("add", store, model, "--partial"),
        ("inspect", store, model, "--partial"),
        ("merge", "--base", toys.base, model, "-o", tmp_path / "out", "--partial"),
        ("merge", "--base", model, toys.experts[0], "-o", tmp_path / "out", "--partial"),
        ("calibrate", store, "known", "--inputs", texts, "--expert", model),
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", REFUSED.values(), ids=REFUSED.keys())
def test_a_pickle_in_the_weights_is_never_executed(
    write: Write,
    proof: Path,
    commands: Callable[[Path], list[tuple[object, ...]]],
    mergestream: RunCommand,
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    model = write(tmp_path / "model", Evil(os.mkdir, str(proof)))
    for command in commands(model):
        result = mergestream(*command)
        assert not proof.exists(), command
        assert result.code == 1 and len([line for line in result.err.splitlines() if line.startswith("error: ")]) == 1
        assert "Traceback" not in result.err


def test_a_pickle_beside_the_weights_is_never_executed(
    proof: Path, toys: Toys, tmp_path: Path, done: Callable[..., str]
) -> None:
    model = save_model(tmp_path / "model", toy_expert(1))
    for name in BESIDE:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(archived(Evil(os.mkdir, str(proof))))
    (model / "modules.json").write_text('[{"path": "1_Dense", "type": "sentence_transformers.models.Dense"}]')
    store = tmp_path / "store"
    done("init", store, "--base", model)
    done("add", store, toys.experts[1])
    done("add", store, model, "--name", "again", "--allow-duplicate")
    done("inspect", store, model)
    done("export", store, tmp_path / "out")
    done("merge", "--base", model, toys.experts[1], "-o", tmp_path / "merged")


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".safetensors", ".parquet", ".jsonl", ".txt", ".pt"])
def test_a_pickle_in_inputs_is_never_executed(
    suffix: str,
    proof: Path,
    commands: Callable[[Path], list[tuple[object, ...]]],
    toys: Toys,
    mergestream: RunCommand,
    tmp_path: Path,
) -> None:
    commands(tmp_path)
    inputs, payload = tmp_path / f"inputs{suffix}", Evil(os.mkdir, str(proof))
    if suffix == ".npz":
        numpy.savez(inputs, input_ids=numpy.array([payload, payload, payload], dtype=object), allow_pickle=True)
    else:
        inputs.write_bytes(raw(payload))
    for command in ("calibrate", "known"), ("add", toys.experts[1]):
        result = mergestream(command[0], tmp_path / "store", command[1], "--inputs", inputs)
        assert not proof.exists() and result.code == 1 and "Traceback" not in result.err


def test_the_payload_works(tmp_path: Path) -> None:
    for number, data in enumerate((raw, archived, beside_tensors)):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(data(Evil(os.mkdir, str(tmp_path / f"proof-{number}"))))
        torch.load(path, weights_only=False) if data is not raw else pickle.loads(path.read_bytes())
        assert (tmp_path / f"proof-{number}").is_dir()
