"""``mergestream.json`` says what an export was made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mergestream import Store, __version__
from mergestream.checkpoints import open_checkpoint
from mergestream.digest import combined_digest, tensor_digest
from tests.conftest import Toys
from tests.workshop import Workshop, llama, workshop  # noqa: F401


@pytest.fixture
def here(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the toys, so that they have short names."""
    monkeypatch.chdir(toys.base.parent)
    return toys.base.parent


def read_recipe(export: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((export / "mergestream.json").read_text())
    return found


def test_a_ledger(tmp_path: Path, here: Path, done: Callable[..., str]) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    done("init", store, "--base", "base", "--not-linear", "layers.0.q.*")
    done("add", store, "expert-1", "--ignore", "temperature")
    done("add", store, "./expert-2", "--name", "two")
    done("export", store, out, "--readout", "tsv", "--without", "expert-1", "--weight", "two=0.5", "--dtype", "float32")
    recipe, manifest = read_recipe(out), Store(store).manifest
    assert recipe["mergestream"] == __version__ and recipe["command"].startswith("mergestream")
    assert recipe["recipe"] == 1 and recipe["made_by"] == "store"
    assert (recipe["method"], recipe["parameters"]) == ("ledger", manifest.parameters)
    globs = {"linear": [], "not_linear": ["layers.0.q.*"], "heads": []}
    assert recipe["base"] == {"source": "base", "digest": manifest.base.digest, **globs}
    one, two = recipe["experts"]
    assert [one["name"], one["source"], two["name"], two["source"]] == ["expert-1", "expert-1", "two", "./expert-2"]
    assert [one["digest"], two["digest"]] == [entry.digest for entry in manifest.history]
    assert one["options"]["ignore"] == ["temperature"] and one["cut"] == manifest.history[0].cut > 0
    chosen = {"readout": "tsv", "only": [], "without": ["expert-1"], "weights": {"two": 0.5}}
    assert recipe["readout"] == {**chosen, "scale": None, "task": None, "files_from": None}
    form = {"format": "full", "rank": None, "dtype": "float32", "max_shard_size": 5 * 10**9}
    assert recipe["form"] == form


def test_the_result_is_the_digest_of_the_tensors(tmp_path: Path, here: Path, done: Callable[..., str]) -> None:
    done("merge", "--base", "base", "--method", "average", "expert-1", "expert-2", "-o", tmp_path / "out")
    recipe = read_recipe(tmp_path / "out")
    with open_checkpoint(tmp_path / "out") as written:
        digests = {name: tensor_digest(written.read(name)) for name in written.tensors}
    assert recipe["made_by"] == "merge" and recipe["result"] == combined_digest(digests)
    assert recipe["base"]["digest"] == Store.create(tmp_path / "store", "base").manifest.base.digest
    assert [expert["name"] for expert in recipe["experts"]] == ["expert-1", "expert-2"]


def test_adapters(tmp_path: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    workshop.adapter(workshop.base(llama), "a", 1, r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    store = Store.create("store", "base", config_only=True)
    store.add("a")
    store.export_adapter("one", rank=2)
    store.export_adapters("all")
    one, each = read_recipe(Path("one")), read_recipe(Path("all"))
    assert one["base"]["digest"] is None
    assert (one["form"]["format"], one["form"]["rank"], one["form"]["max_shard_size"]) == ("lora", 2, None)
    assert (each["form"]["format"], each["form"]["rank"]) == ("loras", None)
