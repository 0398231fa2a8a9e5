"""Files of torch.save: tensors only, and whatever else a pickle wants is refused without being run."""

import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError


class Malicious:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


def refused(path: Path, message: str) -> None:
    with pytest.raises(MergestreamError, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "module"])
def test_state_dicts_are_read_wrapped_or_not(tmp_path: Path, suffix: str, wrapper: str | None) -> None:
    tensors: dict[str, Any] = {
        "a": torch.nn.Parameter(torch.randn(3, 4)),
        "half": torch.randn(5).bfloat16(),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 2),
        "transposed": torch.randn(3, 2).T,
        "layer._extra_state": None,
    }
    path = tmp_path / f"x{suffix}"
    torch.save({wrapper: tensors, "epoch": 3, "optimizer": {"lr": 0.1}} if wrapper else tensors, path)
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.tensors) == set(tensors) - {"layer._extra_state"}
    for name, info in checkpoint.tensors.items():
        tensor = checkpoint.read(name)
        assert torch.equal(tensor, tensors[name]) and not tensor.requires_grad
        assert info.shape == tuple(tensor.shape) and info.file == path.name
    assert checkpoint.tensors["half"].dtype == "BF16" and checkpoint.fingerprint


def test_a_whole_state_dict_of_a_module_is_read(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == set(module.state_dict())


def test_tied_tensors_are_aliases_and_other_views_are_not(tmp_path: Path) -> None:
    shared = torch.randn(4, 4)
    state = {"embed": shared, "part": shared[:2], "turned": shared.T, "head": shared, "copy": shared.clone()}
    torch.save(state, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert dict(checkpoint.aliases) == {"head": "embed"} == dict(open_checkpoint(state).aliases)
    assert torch.equal(checkpoint.read("head"), shared) and "head" in checkpoint.tensors


def test_a_malicious_pickle_is_not_executed(tmp_path: Path) -> None:
    proof, path = tmp_path / "proof", tmp_path / "x.pt"
    torch.save({"a": torch.ones(2), "b": Malicious(proof)}, path)
    refused(path, "a pickle of more than tensors.*mkdir.*not executed.*safetensors")
    torch.save({"a": torch.ones(2), "b": Malicious(proof)}, path, _use_new_zipfile_serialization=False)
    refused(path, "not executed.*safetensors")
    assert not proof.exists()


def test_a_pickled_module_is_refused(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "torch.nn.modules.linear.Linear.*not executed")


def test_the_old_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    refused(tmp_path / "x.bin", "old format.*convert it to safetensors")


def test_a_compressed_archive_is_refused_instead_of_misread(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2000)}, tmp_path / "stored.pt")
    with (
        zipfile.ZipFile(tmp_path / "stored.pt") as stored,
        zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in stored.namelist():
            packed.writestr(entry, stored.read(entry))
    refused(tmp_path / "x.pt", "compressed")


@pytest.mark.parametrize("content", [torch.ones(2), [1, 2], 3, None])
def test_what_is_no_state_dict_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "no state dict")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": torch.ones(1), "epoch": 3}, "'epoch' of type int, no tensor"),
        ({1: torch.ones(1)}, "key 1 is not a name"),
        ({"a": torch.ones(8).to(torch.float8_e4m3fn)}, "'a'.*quantised.*dequantise"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "'a'.*complex64; save it as"),
        ({"a": torch.eye(3).to_sparse()}, "'a'.*dense"),
        ({"a": torch.ones(3, device="meta")}, "'a'.*dense"),
        ({}, "holds no tensors"),
    ],
)
def test_entries_that_cannot_be_merged_are_named(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", message)


def test_other_files_are_no_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    for content in (b"", b"hello", b"{}"):
        path.write_bytes(content)
        refused(path, "no checkpoint")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(path, "not one that torch.save wrote")


def test_torchscript_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name in ("x/data.pkl", "x/constants.pkl", "x/code/__torch__.py"):
            archive.writestr(name, b"")
    refused(tmp_path / "x.pt", "TorchScript")


def test_truncation_anywhere_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(4, 4), "b": torch.ones(8).half()}, path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(MergestreamError):
            open_checkpoint(path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_random_damage_is_a_sentence_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(4, 4), "b": torch.ones(8).half()}, path)
    whole = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(path)
        except MergestreamError:
            refused += 1
            continue
        for name, info in checkpoint.tensors.items():
            assert tuple(checkpoint.read(name).shape) == info.shape
            checkpoint.read(name).double().sum()  # every element lies within the file
    assert refused > 100


def test_a_state_dict_within_itself_has_an_end(tmp_path: Path) -> None:
    path, cyclic = tmp_path / "model.bin", dict[str, Any]()
    cyclic["state_dict"] = cyclic
    torch.save(cyclic, path)
    refused(path, "contains itself")


def test_an_expanded_tensor_is_not_multiplied_out(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({"a": torch.ones(1).expand(2**45)}, path)
    refused(path, "'a' .* was expanded")


def test_half_a_surrogate_pair_is_no_name(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({"a\ud800": torch.ones(1)}, path)
    refused(path, "is not a name")


def test_tuples_that_double_with_every_level_are_not_hashed(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    doubled = b"h\x00\x86q\x00" * 60  # get the tuple, make a pair of it and itself, put it back
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02})q\x00" + doubled + b"K\x01s.")
    refused(path, "endlessly nested tuples")
