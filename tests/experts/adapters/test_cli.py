"""Adapters on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunCommand, Toys
from tests.handmade import handmade_adapter


@pytest.fixture
def cli(mergestream: RunCommand) -> Any:
    """Runs a command that must end with ``code``."""

    def run(*arguments: Any, code: Any = 0) -> Any:
        result = mergestream(*arguments)
        assert result.code == code, result.err
        return result

    return run


@pytest.fixture
def adapters(tmp_path: Path) -> Any:
    return [handmade_adapter(tmp_path / "adapters" / name, seed) for seed, name in enumerate(["law", "code", "poems"])]


def test_from_init_to_an_adapter(tmp_path: Path, toys: Toys, cli: Any, adapters: Any) -> None:
    store, out = tmp_path / "store", tmp_path / "merged"
    cli("init", store, "--base", toys.base, "--method", "opcm")
    printed = cli("add", store, *adapters)
    assert "step 3: poems" in printed.out
    rank = json.loads(cli("status", store, "--json").out)["rank"]
    assert rank > 2
    assert json.loads(cli("log", store, "--json").out)[2]["rank"] == rank
    assert "merged by opcm, exactly" in cli("export", store, out, "--format", "lora").out
    assert "of the energy left out" in cli("export", store, tmp_path / "small", "--format", "lora", "--rank", 1).out
    assert json.loads((out / "adapter_config.json").read_text())["r"] == rank
    cli("export", store, tmp_path / "full")
    cli("verify", store)


def test_an_adapter_may_be_named_by_its_weights(tmp_path: Path, toys: Toys, cli: Any, adapters: Any) -> None:
    store = tmp_path / "store"
    cli("init", store, "--base", toys.base)
    assert "step 1: law" in cli("add", store, adapters[0] / "adapter_model.safetensors").out


def test_dry_run_and_inspect(tmp_path: Path, toys: Toys, cli: Any, adapters: Any) -> None:
    store = tmp_path / "store"
    cli("init", store, "--base", toys.base)
    assert "would be step 1" in cli("add", store, adapters[0], "--dry-run").out
    facts = json.loads(cli("inspect", store, adapters[0], "--json").out)
    assert facts["fates"]["merged"] == 3
    assert facts["tensors"]["layers.0.q.weight"]["kept"] == 1


def test_methods_that_need_dense_tensors_say_so(tmp_path: Path, toys: Toys, cli: Any, adapters: Any) -> None:
    store = tmp_path / "store"
    cli("init", store, "--base", toys.base, "--method", "ties")
    assert "ties needs dense tensors: the adapter is multiplied out" in cli("add", store, adapters[0]).err


def test_an_adapter_of_another_base_is_noted(tmp_path: Path, toys: Toys, cli: Any) -> None:
    store = tmp_path / "store"
    cli("init", store, "--base", toys.base)
    adapter = handmade_adapter(tmp_path / "alien", 1, base_model_name_or_path="somebody/else")
    assert "made for somebody/else" in cli("add", store, adapter).err


def test_mistakes_are_one_sentence(tmp_path: Path, toys: Toys, cli: Any, adapters: Any) -> None:
    store = tmp_path / "store"
    cli("init", store, "--base", toys.base)
    dora = handmade_adapter(tmp_path / "dora", 1, use_dora=True)
    assert "lora_magnitude_vector.default.weight is missing" in cli("add", store, dora, code=1).err
    other = handmade_adapter(tmp_path / "other", 1, modules={"layers.9.q": (8, 8)})
    assert "made for another model" in cli("add", store, other, code=1).err
    assert "--format lora" in cli("export", store, tmp_path / "out", "--rank", 2, code=2).err
    assert "is an adapter" in cli("init", tmp_path / "s2", "--base", adapters[0], code=1).err


def test_merge_takes_adapters(tmp_path: Path, toys: Toys, cli: Any, adapters: Any) -> None:
    cli("merge", "--base", toys.base, "--method", "average", *adapters, toys.experts[0], "-o", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
