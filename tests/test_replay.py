"""A replay gives the same bytes as the export, or an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mergestream import Average, Store
from mergestream.errors import MergestreamError, MergestreamWarning
from mergestream.export.recipe import read_recipe
from mergestream.replay import replay
from tests.conftest import RunCommand, Toys, files, save_model
from tests.workshop import Workshop, llama, workshop  # noqa: F401

MARKER = "mergestream.json"


def written(directory: Path) -> dict[str, bytes]:
    """All but what tells when, and by which command."""
    return {name: data for name, data in files(directory).items() if Path(name).name not in ("README.md", MARKER)}


def recipe(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / MARKER).read_text())
    del found["command"]
    return found


def assert_made_again(first: Path, again: Path) -> None:
    assert written(again) == written(first) and len(written(again)) >= 1
    assert recipe(again) == recipe(first)


@pytest.fixture
def here(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the toys are, so that they have short names."""
    monkeypatch.chdir(toys.base.parent)
    return toys.base.parent


@pytest.mark.parametrize(
    "options",
    [
        ("--readout", "tsv", "--without", "expert-1", "--weight", "expert-2=0.5", "--dtype", "float32"),
        ("--readout", "sum", "--scale", "0.25", "--max-shard-size", "1000B"),
        ("--balance",),
        ("--format", "lora", "--rank", "2", "--readout", "expert:expert-2"),
        ("--format", "loras", "--rank", "3"),
    ],
    ids=" ".join,
)
def test_a_ledger(tmp_path: Path, here: Path, done: Callable[..., str], options: tuple[str, ...]) -> None:
    ignored = ("--ignore", "temperature", "--ignore", "layers.0.experts.up", "--ignore", "empty")
    done("init", tmp_path / "store", "--base", "base", "--not-linear", "layers.0.q.*")
    done("add", tmp_path / "store", "expert-1", *ignored)
    done("add", tmp_path / "store", "./expert-2", "--name", "expert-2", *ignored)
    done("export", tmp_path / "store", tmp_path / "first", *options)
    said = done("replay", tmp_path / "first" / MARKER, "-o", tmp_path / "again")
    assert "2 experts merged again by ledger, bit-identical to the original" in said
    assert_made_again(tmp_path / "first", tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "first", "store"]


@pytest.mark.parametrize("method", ["opcm", "ties", "average"])
def test_a_state(tmp_path: Path, here: Path, done: Callable[..., str], method: str) -> None:
    done("init", tmp_path / "store", "--base", "base", "--method", method)
    done("add", tmp_path / "store", "expert-1", "expert-2", "expert-3")
    done("undo", tmp_path / "store")
    done("export", tmp_path / "store", tmp_path / "first")
    done("replay", tmp_path / "first", "-o", tmp_path / "again")
    assert_made_again(tmp_path / "first", tmp_path / "again")


@pytest.mark.parametrize("method", ["opcm", "average", "ledger", "dare"])
def test_a_one_shot_merge(tmp_path: Path, here: Path, done: Callable[..., str], method: str) -> None:
    done("merge", "--base", "base", "--method", method, "expert-1", "expert-2", "-o", tmp_path / "first")
    done("replay", tmp_path / "first", "-o", tmp_path / "again")
    assert_made_again(tmp_path / "first", tmp_path / "again")
    store = Store.create(tmp_path / "store", "base")
    assert read_recipe(tmp_path / "first" / MARKER).base.digest == store.manifest.base.digest


def test_a_ledger_that_had_more_experts_is_cut_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    base = {"layer.weight": torch.randn(64, 64, generator=generator)}
    save_model(Path("base"), base)
    store = Store.create("store", "base")
    for number in range(17):  # the first entries are written anew
        delta = (0.01, 0.03, 0.1)[number % 3] * torch.randn(64, 64, generator=generator)
        store.add(save_model(Path(f"expert-{number}"), {"layer.weight": base["layer.weight"] + delta}))
    for number in range(2, 17):
        store.remove(f"expert-{number}")
    store.export("first")
    assert replay("first", "again").same
    assert_made_again(Path("first"), Path("again"))


def test_a_subtracted_expert_makes_a_replay_inexact(tmp_path: Path, here: Path) -> None:
    store = Store.create(tmp_path / "store", "base", Average())
    for name in ("expert-1", "expert-2", "expert-3"):
        store.add(name)
    store.remove("expert-1", "expert-1")
    store.export(tmp_path / "first")
    assert not read_recipe(tmp_path / "first" / MARKER).exact
    with pytest.warns(MergestreamWarning, match="an expert was subtracted"):
        assert not replay(tmp_path / "first", tmp_path / "again").same


def test_adapters(tmp_path: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    base = workshop.base(llama)
    for seed in (1, 2):
        workshop.adapter(base, f"a{seed}", seed, r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    store = Store.create("store", "base", config_only=True)
    store.add("a1")
    store.add("a2")
    store.export_adapter("first")
    assert replay("first", "again").same
    assert_made_again(Path("first"), Path("again"))
    assert recipe(Path("first"))["base"]["digest"] is None


def make_first(tmp_path: Path) -> Path:
    store = Store.create(tmp_path / "store", "base")
    store.add("expert-1")
    return store.export(tmp_path / "first", pictures=False)


def test_models_that_have_moved_are_passed_by_option(
    tmp_path: Path, here: Path, mergestream: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_first(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = mergestream("replay", first, "-o", "again")
    assert result.code == 1 and "say where they are: --base base --source expert-1=expert-1" in result.err
    moved = ("--base", here / "base", "--source", f"expert-1={here / 'expert-1'}")
    assert mergestream("replay", first, "-o", "again", *moved).code == 0
    assert written(tmp_path / "again") == written(first)
    result = mergestream("replay", first, "-o", "more", "--source", "expert=x")
    assert result.code == 2 and "did you mean expert-1?" in result.err
    assert mergestream("replay", first, "-o", "more", "--source", "expert-1").code == 2


def test_models_beside_the_export_are_found(tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (toys.base, toys.experts[0]):
        (tmp_path / model.name).mkdir()
        (tmp_path / model.name / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    monkeypatch.chdir(tmp_path)
    make_first(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert replay("../first", "again").same


@pytest.mark.parametrize("made_by", ["store", "merge"])
def test_a_model_that_has_changed_is_refused(tmp_path: Path, here: Path, mergestream: RunCommand, made_by: str) -> None:
    if made_by == "store":
        make_first(tmp_path)
    else:
        assert mergestream("merge", "--base", "base", "expert-1", "-o", tmp_path / "first").code == 0
    again = ("replay", tmp_path / "first", "-o", tmp_path / "again")
    result = mergestream(*again, "--source", "expert-1=expert-2")
    assert result.code == 1 and "expert-2 is not expert-1 of the recipe, or has changed since" in result.err
    assert "--source expert-1=PATH" in result.err and result.err.count("\n") == 1
    result = mergestream(*again, "--base", "expert-4")
    assert result.code == 1 and "expert-4 is not the base of the recipe, or has changed since" in result.err
    assert not (tmp_path / "again").exists()


def change(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update({key: value})


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda data: data.pop("recipe"), "is not a recipe; pass the mergestream.json"),
        (change("recipe", 2), "a recipe of format 2; upgrade"),
        (change("method", ["x"]), "not a valid recipe: Expected `str`, got `array` - at `$.method`"),
        (change("method", "evil"), "there is no method evil"),
        (change("parameters", {"x": 1}), "x"),
        (change("experts", []), "every expert needs a unique name"),
        (change("result", "x"), "result"),
        (lambda data: data["experts"][0].update(options={"evaluate": "rm"}), "added with evaluate, which this version"),
        (lambda data: data["experts"][0].update(options={"partial": "rm"}), "`bool`"),
        (lambda data: data["experts"][0].update(digest=""), "digest"),
        (lambda data: data["experts"][0].update(source="/etc/passwd"), "--source expert-1=/etc/passwd"),
        (lambda data: data["experts"][0].update(source="../x"), "--source expert-1=../x"),
        (lambda data: data["base"].update(source="base/../../base"), "lie outside of this directory"),
        (lambda data: data["form"].update(dtype="int8"), "int8"),
    ],
)
def test_an_invalid_recipe_is_one_error(
    tmp_path: Path, here: Path, mergestream: RunCommand, edit: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    first = make_first(tmp_path)
    data = json.loads((first / MARKER).read_text())
    edit(data)
    (tmp_path / "theirs.json").write_text(json.dumps(data))
    result = mergestream("replay", tmp_path / "theirs.json", "-o", tmp_path / "again")
    assert result.code in (1, 2) and sentence in result.err and result.err.count("\n") == 1
    assert not (tmp_path / "again").exists()


def test_a_missing_recipe_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(MergestreamError, match=r"nothing.json cannot be read"):
        replay(tmp_path / "nothing.json", tmp_path / "again")
